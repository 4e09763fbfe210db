"""The mechanism in dp_accounting's words, for those who account with that library."""

from __future__ import annotations

from typing import assert_never

import dp_accounting
from dp_accounting import dp_event

from dptrain.accounting import UnsampledGaussian
from dptrain.accounting.base import size_refusal
from dptrain.accounting.poisson import tosses_coins
from dptrain.core import Adjacency, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import CyclicPoisson, Poisson, Shuffled, UserFixed


def neighboring_relation(adjacency: Adjacency) -> dp_accounting.NeighboringRelation:
    """dp_accounting's name of an adjacency: zero-out is its REPLACE_SPECIAL."""
    match adjacency:
        case Adjacency.ZERO_OUT:
            return dp_accounting.NeighboringRelation.REPLACE_SPECIAL
        case Adjacency.ADD_REMOVE:
            return dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        case Adjacency.REPLACE_ONE:
            return dp_accounting.NeighboringRelation.REPLACE_ONE
        case _:
            assert_never(adjacency)


def to_dp_event(mechanism: MatrixMechanism, adjacency: Adjacency | None = None) -> dp_event.DpEvent:
    """An event of dp_accounting whose privacy bounds the mechanism's under ``adjacency``.

    >>> accountant = pld.PLDAccountant(neighboring_relation(mechanism.adjacency))
    >>> accountant.compose(to_dp_event(mechanism)).get_epsilon(1e-5)

    * ``Poisson`` (and ``MinSep`` with ``min_sep=1``) with independent noise: n Poisson-sampled
      Gaussians of noise σ/max_t ‖C_{:,t}‖; coins are independent of everybody else, so all three
      adjacencies.
    * ``CyclicPoisson`` with bands ≤ cycle, batches not cut: ceil(n/b) of them (the proof is with
      ``PoissonPLD``; under replace-one the same blocks have the shifts Bern(p)·v and Bern(p)·v').
      Adding an example changes equal parts, so add-remove needs ``assignment="independent"`` (or
      one part).
    * ``Poisson`` with ``max_batch_size`` and independent noise: n truncated subsampled Gaussians,
      all three adjacencies (add-remove only where nothing can be cut: the event is about one N,
      which is private there). dp_accounting bounds them looser than ``PoissonPLD`` does.
    * ``Shuffled`` and ``UserFixed``: one Gaussian of noise σ/sens; zero-out only (without an
      example, or with another's users, the batches would be other batches).

    No other scheme has an event: they correlate an example's steps, or examples of one step.

    Args:
        mechanism: scheme, strategy and σ; σ = 0 gives the event of no privacy.
        adjacency: the relation that the event will be accounted under, by default the mechanism's.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if no event bounds the mechanism under this adjacency, saying why.
    """
    checks.instance("mechanism", mechanism, MatrixMechanism)
    mechanism = mechanism.participants
    scheme, strategy = mechanism.scheme, mechanism.strategy
    adjacency = mechanism.adjacency if adjacency is None else adjacency
    checks.instance("adjacency", adjacency, Adjacency, example="Adjacency.ZERO_OUT")
    neighboring_relation(adjacency)  # of any other relation dp_accounting knows nothing
    if reason := size_refusal(adjacency, mechanism):
        raise _none(mechanism, adjacency, reason)
    bands, b = strategy.bands, scheme.min_sep
    norm = float(strategy.column_norms(mechanism.steps).max())
    noise = mechanism.noise_multiplier / norm
    if isinstance(scheme, Shuffled | UserFixed):
        if adjacency is not Adjacency.ZERO_OUT:
            raise _none(mechanism, adjacency, "its batches depend on which examples exist")
        curve = UnsampledGaussian().curve(mechanism)
        event: dp_event.DpEvent = dp_event.GaussianDpEvent(
            mechanism.noise_multiplier / curve.sensitivity
        )
        count = 1
    elif isinstance(scheme, CyclicPoisson) and scheme.max_batch_size is None:
        if bands > b:
            raise _none(mechanism, adjacency, f"bands={bands} reach beyond cycle={b}")
        fixed_parts = scheme.assignment == "equal" and b > 1
        if fixed_parts and not adjacency.public_size:
            raise _none(
                mechanism, adjacency, "equal parts depend on N; use assignment='independent'"
            )
        event = _sampled(scheme.probability, noise)
        count = scheme.max_participations
    elif isinstance(scheme, Poisson) or tosses_coins(scheme):
        if bands > 1:
            reason = f"bands={bands} correlate the noise of different steps; use Identity()"
            raise _none(mechanism, adjacency, reason)
        event = _sampled(scheme.probability, noise)
        one_more = scheme.nominal_size is not None
        largest = scheme.population + one_more
        if scheme.max_batch_size is not None and scheme.max_batch_size < largest:
            if one_more:
                reason = "the event holds for one number of examples, which is private"
                raise _none(mechanism, adjacency, f"{reason}; leave max_batch_size out")
            event = dp_event.TruncatedSubsampledGaussianDpEvent(
                dataset_size=scheme.dataset_size,
                sampling_probability=scheme.probability,
                truncated_batch_size=scheme.max_batch_size,
                noise_multiplier=noise,
            )
        count = mechanism.steps
    else:
        raise _none(mechanism, adjacency, "dp_accounting has no event for this sampling")
    if noise == 0.0:
        return dp_event.NonPrivateDpEvent()
    return event if count == 1 else dp_event.SelfComposedDpEvent(event, count)


def _sampled(probability: float, noise: float) -> dp_event.DpEvent:
    return dp_event.PoissonSampledDpEvent(probability, dp_event.GaussianDpEvent(noise))


def _none(mechanism: MatrixMechanism, adjacency: Adjacency, why: str) -> ValueError:
    scheme = type(mechanism.scheme).__name__
    return ValueError(
        f"scheme={scheme}: no dp_accounting event bounds it under adjacency={adjacency.value!r}: "
        f"{why}. dptrain.account(mechanism, ...) states its guarantee"
    )
