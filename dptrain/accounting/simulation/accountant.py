"""Accountants that simulate: terms below a proven bound on δ, and what their means show."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from dptrain.accounting.base.accountant import Accountant, Profile
from dptrain.accounting.base.curve import convex_envelope
from dptrain.accounting.base.statement import (
    check_delta,
    check_epsilon,
    checked_grid,
    checked_sigma,
    statement,
    without_noise,
)
from dptrain.accounting.losses.hockey_stick_terms import hockey_stick
from dptrain.accounting.simulation import certificate_cache
from dptrain.accounting.simulation.certificate import (
    GUARANTEE,
    METHOD,
    PROFILE,
    STEP,
    Claim,
    chosen_point,
    evidence,
    fresh_seed,
    package_version,
    verified_rows,
)
from dptrain.accounting.simulation.confidence import (
    counted_split,
    upper_confidence,
    upper_confidence_by_squares,
)
from dptrain.accounting.simulation.draws import ALONE, Kept, Processes, SharedDraws
from dptrain.accounting.simulation.law import PlainLaw, SimulatedLaw
from dptrain.accounting.simulation.simulation import DIRECTIONS, default_threads, loss_chunks
from dptrain.accounting.simulation.terms import Both
from dptrain.accounting.simulation.verdicts import Rule
from dptrain.core import Array, Guarantee, Kind, checks
from dptrain.mechanism import MatrixMechanism

# Of a profile: points that are sampled, as many as ``default_grid`` has, and the least number of
# points that its samples are shared by.
_PROFILE_POINTS, _PROFILE_SHARES = 101, 24
_DEEP = 1e-290


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedAccountant(Accountant):
    """Certification of the pair of a ``SimulatedLaw`` by terms of its samples.

    δ(ε) is the mean of terms that never exceed a proven bound M: so many samples are needed as M/δ
    says (docs/theory/certification.md#thm-weighted-verdict). A grid is declared, fresh samples
    verify it from its most private point on (the add direction from the other end), and the answer
    is wrong only if one event of probability q happened
    (docs/theory/certification.md#thm-weighted-looks).

    In ``calibrate`` the chance of failure is a thousandth of δ and part of it. Where more than
    ``max_samples`` samples would be needed to better the deterministic bound, that bound stands; of
    samples without weights (``PlainLaw``) so many are refused.

    Args:
        seed: of all streams; by default 128 fresh random bits a call. It must not depend on the
            data or the training run. Recorded in the certificate.
        failure_probability: chance q over the accountant's draws that a statement of kind
            CONFIDENCE (``guarantee``, ``profile``) is false.
        max_samples: samples a direction at most. A certificate has its own, by which it is read.
        threads: threads; by default all cores. The results do not depend on it.
        cache: directory of certificates: ``calibrate`` makes one once and reuses it, whatever
            ``seed`` says, as another attempt would add its chance of failure. A file is checked
            against all that its request determines; its means and verdicts are trusted. What an
            interrupted call has drawn is kept there as well, and the same call continues. Of
            several calls at once for the same certificate one draws, and the others wait for it.
        recheck: whether not to trust them: the samples of a cached certificate are drawn again
            from its seed, at the cost of the first time.
        progress: whether to show progress bars (after two seconds).
        attempts: how many certificates of ``calibrate`` are made for one purpose, where what they
            say picks one: δ includes the chance that any of them is wrong. A cached certificate
            that counts more attempts than these answers as well.
        profile_samples: samples a direction of all points of ``profile`` together, of which one
            point gets a twenty-fourth at most, or, where samples have no weights, of each. With
            four times as many the values are nearer to the truth by half, and take four times as
            long.
        together: the processes that draw together, all of which make the same call; by default
            this one alone.

    Raises:
        TypeError: if an option is of another type.
        ValueError: if an option is out of range.
    """

    seed: int | None = None
    failure_probability: float = 1e-6
    max_samples: int = 10**8
    threads: int | None = None
    cache: str | os.PathLike[str] | None = None
    recheck: bool = False
    progress: bool = True
    attempts: int = 1
    profile_samples: int = 480_000
    together: Processes = dataclasses.field(default=ALONE, repr=False, compare=False)

    kind = Kind.CONFIDENCE
    ample: ClassVar[int] = 65_536  # see Rule
    changes: ClassVar[int] = 0  # how often the meaning of its own certificates has changed
    instead: ClassVar[str] = "an accountant without simulation"  # where samples are too many

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("max_samples", "threads", "profile_samples", "attempts"):
            if (value := getattr(self, option)) is not None:
                checks.integer(option, value)
        checks.number("failure_probability", self.failure_probability, above=0, below=1)
        if self.seed is not None:
            checks.integer("seed", self.seed, minimum=0)
        if self.cache is not None:
            checks.instance("cache", self.cache, (str, os.PathLike), example="'certificates'")
        checks.flag("recheck", self.recheck)
        checks.flag("progress", self.progress)

    @abstractmethod
    def law(self, mechanism: MatrixMechanism) -> SimulatedLaw:
        """The law of a mechanism that is not refused."""

    def among(self, attempts: int) -> Self:
        """The same accountant with so many ``attempts``."""
        return dataclasses.replace(self, attempts=attempts)

    @property
    def _method(self) -> dict[str, Any]:
        return {"name": self.name, "version": METHOD + self.changes}

    def _checked(self, mechanism: MatrixMechanism) -> SimulatedLaw:
        self.check_covers(mechanism)
        return self.law(mechanism)

    def _rule(self, law: SimulatedLaw, violated: float, failure: float) -> Rule:
        most = min(self.max_samples, law.most_samples)
        if isinstance(law, PlainLaw):
            return Rule.plain(violated, failure, most)
        return Rule(violated, failure, most, self.ample)

    def _check_affordable(self, law: SimulatedLaw, rule: Rule) -> None:
        """Refuse draws without weights of which no verdict would come."""
        if isinstance(law, PlainLaw) and not rule.looks(1.0):
            raise ValueError(
                f"a simulation of δ = {rule.violated:.3g} takes {rule.span(1.0)[0]:.3g} samples a "
                f"direction, above max_samples={rule.most}; raise max_samples of the accountant, "
                f"or use a larger δ or {self.instead}"
            )

    def _draws(self, seed: int, kept: Kept | None = None) -> SharedDraws:
        threads = self.threads or default_threads()
        return SharedDraws(seed, threads, self.progress, self.together, kept)

    @contextlib.contextmanager
    def _begun(self, question: dict[str, Any], rule: Rule) -> Iterator[SharedDraws]:
        """Fresh draws, or those that an interrupted call with this question left.

        Whoever else asks the question in the same folder waits until they are done.
        """
        with contextlib.ExitStack() as alone:

            def begin() -> tuple[int, Kept | None]:
                seed = fresh_seed(self.seed)
                if self.cache is None:
                    return seed, None
                path = certificate_cache.partial_path(Path(self.cache), question)
                alone.enter_context(certificate_cache.held(path, progress=self.progress))
                kept = Kept(path, question, rule, seed)
                return kept.seed, kept

            with self._draws(*self.together.from_first(begin)) as draws:
                yield draws

    def calibrate(self, mechanism: MatrixMechanism, *, epsilon: float, delta: float) -> Guarantee:
        """The least certified σ of a declared grid: kind VERIFIED, a wrong verdict included in δ.

        The run is (ε, δ_v + k q(1-δ_v))-DP with q = δ/(1000 k) for k ``attempts`` and δ_v such that
        this is δ (docs/theory/certification.md#thm-evr). The grid's top is a σ at which the
        deterministic bounds show (ε, δ_v): kind UPPER_BOUND where nothing below it was shown by
        samples.

        Raises:
            ValueError: if the mechanism is refused, ε or δ is out of range, no σ reaches them, δ
                takes too many samples, or a cached certificate is corrupt, or made by a method that
                is gone.
            KeyboardInterrupt: if interrupted; it says where the samples are kept.
        """
        check_epsilon(epsilon)
        check_delta(delta, mechanism.scheme)
        claim = self._claim(self._checked(mechanism), epsilon, delta, self.attempts)
        self.together.agree([claim.request, claim.rule])
        certificate = self.together.from_first(lambda: self._stored(claim))
        if certificate is None:
            self._check_affordable(claim.law, claim.rule)
            with self._begun(claim.request, claim.rule) as draws:
                # Another process may have left one since.
                certificate = self.together.from_first(lambda: self._stored(claim))
                if certificate is None:
                    certificate = claim.certificate(draws)
                    if self.cache is not None and self.together.rank == 0:
                        certificate_cache.store(Path(self.cache), claim.request, certificate)
        return self._stated(mechanism, certificate, epsilon=epsilon, delta=delta)

    def _claim(self, law: SimulatedLaw, epsilon: float, delta: float, attempts: int) -> Claim:
        """(ε, δ_v) by the split of δ among so many attempts."""
        request = {
            "method": self._method,
            "law": law.to_dict(),
            "epsilon": epsilon,
            "delta": delta,
            "package": package_version(),
            **({} if attempts == 1 else {"attempts": attempts}),
        }
        return Claim(law, self._rule(law, *counted_split(delta, attempts)), request)

    def _stored(self, asked: Claim) -> dict[str, Any] | None:
        """The certificate that answers in the folder of certificates, checked, if there is one."""
        if self.cache is None:
            return None
        directory, request = Path(self.cache), asked.request
        attempts = certificate_cache.attempts_stored(directory, request)
        if attempts is None:
            certificate_cache.check_method(directory, request)
            return None
        claim = self._claim(asked.law, request["epsilon"], request["delta"], attempts)
        problems: list[certificate_cache.Problem] = [claim.problem]
        if self.recheck:
            alone = dataclasses.replace(self, together=ALONE)  # the other processes only wait
            problems.append(claim.redrawn(alone._draws))
        path = certificate_cache.path_of(directory, claim.request)
        return certificate_cache.read_certificate(path, *problems)

    def restate(self, mechanism: MatrixMechanism, stated: Guarantee) -> Guarantee:
        """The statement from the samples that its certificate's seed gives once more.

        At the cost of the first time. That no other seed was tried before is not shown by this.

        Raises:
            ValueError: if the mechanism is refused, there is no certificate, it lacks a field, or
                the seed gives something else than it says.
        """
        self.check_covers(mechanism)
        certificate = stated.certificate
        if certificate is None:
            raise ValueError("a statement by simulation needs its certificate, which is missing")
        try:
            certificate_cache.refuse_former(certificate, self._method)
            if "request" in certificate:
                return self._certified_again(mechanism, certificate)
            again = dataclasses.replace(
                self,
                seed=certificate_cache.whole_number(certificate["seed"]),
                failure_probability=certificate["failure_probability"],
                max_samples=certificate["most"],
                cache=None,
            )
            return again.guarantee(mechanism, delta=stated.delta)
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(
                f"its certificate cannot be read ({type(error).__name__}: {error})"
            ) from error

    def _certified_again(
        self, mechanism: MatrixMechanism, certificate: dict[str, Any]
    ) -> Guarantee:
        request = certificate["request"]
        epsilon, delta = check_epsilon(request["epsilon"]), request["delta"]
        attempts = certificate_cache.attempts_of(request)
        claim = self._claim(self._checked(mechanism), epsilon, delta, attempts)
        certificate_cache.check_request(certificate, claim.request)
        if wrong := claim.problem(certificate) or claim.redrawn(self._draws)(certificate):
            raise ValueError(f"its certificate is wrong: {wrong}")
        return self._stated(mechanism, certificate, epsilon=epsilon, delta=delta)

    def _stated(
        self,
        mechanism: MatrixMechanism,
        certificate: dict[str, Any],
        *,
        epsilon: float,
        delta: float,
    ) -> Guarantee:
        """Kind VERIFIED where samples chose σ; where deterministic bounds did, what these are."""
        accepted = [row for row in certificate["grid"] if row["accepted"]]
        kind = Kind.UPPER_BOUND
        note = "Deterministic bounds alone show this: samples did not improve on them"
        if any(row[side]["samples"] for row in accepted for side in DIRECTIONS):
            count = certificate_cache.attempts_of(certificate["request"])
            which = "this one attempt" if count == 1 else f"each of {count} attempts"
            kind = Kind.VERIFIED
            note = (
                "The noise level was chosen and verified by simulation before training; δ includes "
                f"the chance of a wrong verdict, {certificate['failure_probability']:.2g}, for "
                f"{which}, and each further attempt would add as much"
            )
        return statement(
            mechanism.with_noise(certificate["noise_multiplier"]), self, epsilon=epsilon,
            delta=delta, notes=(note,), kind=kind, certificate=certificate,
        )  # fmt: skip

    def guarantee(self, mechanism: MatrixMechanism, *, delta: float) -> Guarantee:
        """The least ε of a declared grid that the samples support at δ: kind CONFIDENCE.

        False with probability at most ``failure_probability``; the grid's top is the deterministic
        ε and needs no verdict.

        Raises:
            ValueError: if the mechanism is refused or δ not in (0, 1).
            KeyboardInterrupt: if interrupted; it says where the samples are kept.
        """
        check_delta(delta, mechanism.scheme)
        law, sigma = self._checked(mechanism), checked_sigma(mechanism)
        if sigma == 0.0:
            return without_noise(mechanism, self, delta)
        top = law.curve.epsilon(sigma, delta)
        rule = self._rule(law, delta, self.failure_probability)
        self._check_affordable(law, rule)
        terms = law.terms(sigma)

        def terms_at(depth: float) -> Both:
            return terms(top / STEP**depth)

        question = {
            "sigma": sigma, "delta": delta, "failure_probability": self.failure_probability,
            "method": self._method, "law": law.to_dict(), "package": package_version(),
        }  # fmt: skip
        self.together.agree([question, rule])
        with self._begun(question, rule) as draws:
            rows = verified_rows(terms_at, rule, draws, GUARANTEE) if top > 0.0 else []
        certificate = {
            **evidence(self._method, law, rule, draws.seed, rows),
            "noise_multiplier": sigma,
            "ceiling": top,
        }
        note = (
            "The statement about this fixed mechanism is false with probability at most "
            f"{self.failure_probability:.2g} over the accountant's own simulation"
        )
        epsilon = top / STEP ** chosen_point(rows)
        return statement(
            mechanism, self, epsilon=epsilon, delta=delta, notes=(note,), certificate=certificate
        )

    def profile(self, mechanism: MatrixMechanism, epsilon: npt.ArrayLike) -> Profile:
        """Upper confidence values of δ(ε): all of them hold at once except with probability q.

        Sampled at 101 points of the grid at most, the fewer the more samples at each, or where
        samples have no weights by the same for all; the deterministic bounds and the chords in e^ε
        between all of these count as well (docs/theory/certification.md#thm-confidence-curve).

        Raises:
            ValueError: if the mechanism is refused or the grid is not ascending and ≥ 0.
        """
        grid = checked_grid(epsilon)
        law, sigma = self._checked(mechanism), checked_sigma(mechanism)
        remove = add = np.ones_like(grid)
        if sigma > 0.0:
            values = np.stack(law.curve.delta(sigma, grid))
            chosen = np.unique(np.linspace(0, grid.size - 1, _PROFILE_POINTS).round().astype(int))
            self.together.agree([law.to_dict(), sigma, grid.tolist()])
            draws = self._draws(self.together.from_first(lambda: fresh_seed(self.seed)))
            bounds = self._weighted_bounds
            if isinstance(law, PlainLaw):
                bounds = self._plain_bounds
            found = bounds(law, sigma, grid, chosen, draws)
            values[:, chosen] = np.minimum(values[:, chosen], found)
            remove, add = (convex_envelope(grid, side) for side in values)
        return Profile(grid, remove, add, self.kind, self.name, self.failure_probability)

    def _weighted_bounds(
        self, law: SimulatedLaw, sigma: float, grid: Array, chosen: Array, draws: SharedDraws
    ) -> Array:
        """Upper bounds that hold at once, from samples of each point's own: (2, chosen points)."""
        found, share = np.ones((2, chosen.size)), self.failure_probability / (2 * chosen.size)
        samples = max(1, self.profile_samples // max(_PROFILE_SHARES, chosen.size))
        terms = law.terms(sigma)
        shown = tqdm(chosen.tolist(), "profile", disable=not self.progress, delay=2.0, leave=False)
        for place, index in enumerate(shown):
            both = terms(grid[index])
            for side, direction in enumerate(DIRECTIONS):
                one = both[direction]
                if one.ceiling < _DEEP:
                    continue  # the deterministic value is as good
                mean = draws.mean(one, samples, [PROFILE, index, side]) / one.ceiling
                mean = min(mean * (1.0 + 1e-12), 1.0)
                shown = upper_confidence if one.bounded else upper_confidence_by_squares
                found[side, place] = one.ceiling * shown(mean, samples, share)
        return found

    def _plain_bounds(
        self, law: SimulatedLaw, sigma: float, grid: Array, chosen: Array, draws: SharedDraws
    ) -> Array:
        """The same bounds from one sample of losses for all points."""
        losses, samples = law.losses, self.profile_samples
        sums, share = np.zeros((2, chosen.size)), self.failure_probability / (2 * chosen.size)
        for block in loss_chunks(
            losses, [sigma], seed=[draws.seed, PROFILE], samples=samples, threads=draws.threads
        ):
            for place, index in enumerate(chosen.tolist()):
                terms = hockey_stick(block[:, 0], grid[index] - losses.slack)
                sums[:, place] += terms.sum(axis=1)
        means = np.minimum(sums / samples * (1.0 + 1e-12), 1.0)
        return np.vectorize(upper_confidence)(means, samples, share)
