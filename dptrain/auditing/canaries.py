"""One run of the real engine in which every example is a canary with a direction of its own.

The model is linear, an example's gradient is a multiple of one coordinate's unit vector, and longer
than the clipping norm. What the run releases in that coordinate is then the game of
``mechanism_audit``, played by loader, clipping, noise, divisor and optimizer together. A coin says
whether a canary is in; one that is out has a gradient of zero. Coordinates that are nobody's show
the noise alone. Users as canaries (``users.canaries``) play on the same stage.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from dptrain.auditing.conformity import Finding, check_noise
from dptrain.auditing.counting import Count, StatedCurve, count
from dptrain.auditing.draws import key
from dptrain.auditing.laws import Game, game_of
from dptrain.auditing.one_run import OneRunAudit, audit_one_run
from dptrain.core import Array, checks
from dptrain.engine import Gradients, PrivacyEngine
from dptrain.individual import IndividualFilter
from dptrain.mechanism import MatrixMechanism

_STRETCH = 4.0  # norm of a canary's gradient over the clipping norm
FEWEST = 8  # canaries, half of whom in the best case are in: counting takes 4 of either kind
_VERDICTS = 4  # ε by one run, the curve by one run, the curve by counting, and the noise


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CanaryRun:
    """The releases of one run with canaries.

    Attributes:
        included: which canaries were in, shape (m,).
        released: the noisy sums of every step over R, in each canary's coordinate; shape (m, n).
        spare: the same in coordinates that are nobody's, shape (k, n).
        others: examples in the run that are not among these canaries.
    """

    included: npt.NDArray[np.bool_]
    released: Array
    spare: Array
    others: int = 0

    @property
    def who(self) -> str:
        """The name of the canaries, in words."""
        return "canaries"

    def games(self, mechanism: MatrixMechanism) -> list[tuple[Game, npt.NDArray[np.int64]]]:
        """The games that are played, and the canaries that play each.

        Raises:
            ValueError: if there is no game of the mechanism.
        """
        return [(game_of(mechanism), np.arange(len(self.included)))]

    def scores(self, mechanism: MatrixMechanism) -> Array:
        """A score for each canary by its own game: larger if the canary seems to be in.

        Raises:
            ValueError: if there is no game of the mechanism.
        """
        found = np.zeros(len(self.included))
        for game, rows in self.games(mechanism):
            found[rows] = game.scores(self.released[rows] @ game.matrix.T)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanaryAudit(OneRunAudit):
    """The evidence of one run with canaries, beside the statement about its mechanism.

    Attributes:
        who: what they are, in words.
        spare: coordinates that showed noise alone.
        counted: the stated curve against canaries as if they were separate runs, which they are if
            the engine is what it says: a true statement passes.
        noise: what was found of the noise.
    """

    who: str
    spare: int
    counted: Count
    noise: tuple[Finding, ...]

    @property
    def violations(self) -> tuple[str, ...]:
        """The findings that contradict the statement, in words; empty if nothing does."""
        level = (1.0 - self.confidence) / _VERDICTS
        found = [*super().violations]
        if self.counted.violated:
            found.append(
                f"δ({self.counted.epsilon:.4g}) ≥ {self.counted.delta_lower:.4g} by counting "
                f"canaries ({self.counted.direction}), stated is {self.counted.delta:.4g}"
            )
        found += [
            f"the noise is not what was accounted for: {each.what} (p = {each.p_value:.2g})"
            for each in self.noise
            if each.p_value < level / len(self.noise)
        ]
        return tuple(found)

    def __str__(self) -> str:
        count = self.counted
        among = (
            f"were among {self.others} other examples, whose gradients they leave as they are"
            if self.others
            else "and no gradients but theirs"
        )
        lines = [
            f"stated:       ε = {self.epsilon:.6g} at δ = {self.delta:.4g}",
            f"one training: {self.canaries} {self.who}, in or out by coins, {among}; "
            f"{self.spare} coordinates were nobody's",
            *self.guesses("by one run"),
            f"by counting:  strictest at ε = {count.epsilon:.4g}: δ at least "
            f"{count.delta_lower:.4g}, stated {count.delta:.4g} ({count.direction}: {count.hits} "
            f"hits, {count.false} false of {count.runs})",
            "noise:",
            *(f"  {each.what} (p = {each.p_value:.2g})" for each in self.noise),
        ]
        return "\n".join([*lines, *self.verdict])


class _Coordinates(nn.Module):
    """A model that outputs Σ_j x_j w_j, with the weights in several layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.sizes = [len(part) for part in np.array_split(np.arange(width), layers)]
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in self.sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, self.sizes, dim=1)
        outputs = [layer(part) for layer, part in zip(self.layers, parts, strict=True)]
        return torch.cat(outputs, dim=1).sum(dim=1)


def run_canaries(
    mechanism: MatrixMechanism,
    *,
    spare: int = 1000,
    layers: int = 2,
    max_grad_norm: float = 1.0,
    gradients: Gradients = Gradients(),
    individual: IndividualFilter | None = None,
    seed: int = 0,
    progress: bool = True,
) -> CanaryRun:
    """Train on canaries with the real engine, and record what it releases.

    Args:
        mechanism: its scheme's ``dataset_size`` is the number m of canaries.
        spare: k, coordinates without a canary.
        layers: of the model; canaries lie in all of them.
        max_grad_norm: R.
        gradients: how the engine forms and clips gradients.
        individual: a budget of every canary. What is then stated is the filter's ε and δ: canaries
            that have spent it are left out, so the mechanism's own curve says too much.
        seed: of the coins and of the run.
        progress: show a bar.

    Raises:
        ValueError: if the game is not about the mechanism, or the scheme's draws of examples depend
            on each other, or an argument is out of range.
    """
    game_of(mechanism)
    m = mechanism.scheme.dataset_size
    spare = checks.integer("spare", spare, minimum=2)
    layers = checks.integer("layers", layers, maximum=m + spare)
    seed = checks.integer("seed", seed, minimum=0)
    return play(
        mechanism,
        np.arange(m),
        spare=spare,
        layers=layers,
        max_grad_norm=max_grad_norm,
        gradients=gradients,
        individual=individual,
        seed=seed,
        progress=progress,
    )


class _Gradients(Dataset[tuple[torch.Tensor]]):
    """A data set whose rows have one entry at most, and are made when they are asked for."""

    def __init__(self, places: npt.NDArray[np.int64], lengths: Array, width: int) -> None:
        self.places, self.lengths, self.width = places, lengths, width

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        row = torch.zeros(self.width)
        row[self.places[index]] = self.lengths[index]
        return (row,)


def play(
    mechanism: MatrixMechanism,
    owners: npt.NDArray[np.int64],
    *,
    spare: int,
    layers: int,
    max_grad_norm: float,
    gradients: Gradients,
    individual: IndividualFilter | None,
    seed: int,
    progress: bool,
) -> CanaryRun:
    """Toss the coins, train, and record the release of every step in each coordinate.

    Args:
        owners: the canary that each example belongs to, or -1; shape (N,). Examples of a canary
            have the same gradient; examples of nobody have none. Canaries whose draws differ in law
            must be numbered at random: ``count`` halves them in this order.
        spare, layers, max_grad_norm, gradients, individual, seed, progress: see ``run_canaries``.
    """
    max_grad_norm = checks.number("max_grad_norm", max_grad_norm, above=0)
    m = int(owners.max()) + 1
    rng = np.random.default_rng(key(seed, 0))
    included = rng.random(m) < 0.5
    places = rng.permutation(m + spare)
    # -1, nobody, takes the last place, with a gradient of zero.
    lengths = _STRETCH * max_grad_norm * np.append(included, False)[owners]
    model = _Coordinates(m + spare, layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    private = PrivacyEngine(accountant="gaussian").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data=_Gradients(places[owners], lengths, m + spare),
        mechanism=mechanism,
        max_grad_norm=max_grad_norm,
        gradients=gradients,
        individual=individual,
        seed=key(seed, 1),
    )
    before = _weights(model)
    steps = []
    divisor = mechanism.scheme.expected_batch_size / max_grad_norm
    bar = tqdm(private.loader, total=mechanism.steps, delay=2, disable=not progress, unit="step")
    for (x,) in bar:
        private.optimizer.zero_grad()
        private.module(x).mean().backward()
        private.optimizer.step()
        after = _weights(model)
        steps.append((before - after) * divisor)
        before = after
    found = np.stack(steps, axis=1)
    return CanaryRun(included=included, released=found[places[:m]], spare=found[places[m:]])


def _weights(model: nn.Module) -> Array:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy()


def audit_canaries(
    mechanism: MatrixMechanism,
    found: CanaryRun,
    *,
    epsilon: float,
    delta: float,
    curve: StatedCurve | None = None,
    confidence: float = 0.99,
) -> CanaryAudit:
    """Compare a run with canaries with the statement about its mechanism.

    Scores are those of the game for hidden participations: the likelihood ratio of what was
    released in a canary's coordinate, whitened by M.

    Args:
        mechanism: of the run.
        found: what it released.
        epsilon: the stated ε.
        delta: the stated δ.
        curve: all of δ(ε) as stated; counting is then far stronger.
        confidence: chance that an engine that is right passes.

    Raises:
        ValueError: if an argument is out of range, the run is not of the mechanism, or too few
            canaries are in, or out.
    """
    checks.instance("mechanism", mechanism, MatrixMechanism)
    checks.instance("found", found, CanaryRun)
    if found.released.shape[1] != mechanism.steps:
        raise ValueError(
            f"found has {found.released.shape[1]} steps, but mechanism has {mechanism.steps}: pass "
            "the mechanism that ran"
        )
    confidence = checks.number("confidence", confidence, above=0, below=1)
    alpha = (1.0 - confidence) / _VERDICTS
    (game, _), *_ = found.games(mechanism)
    scores = found.scores(mechanism)
    inside, outside = scores[found.included], scores[~found.included]
    even = min(len(inside), len(outside))
    if even < FEWEST // 2:
        raise ValueError(
            f"{len(inside)} of {len(scores)} canaries are in, but counting needs {FEWEST // 2} of "
            "either kind: use more canaries, or another seed, which determines who is in"
        )
    return CanaryAudit(
        canaries=len(scores),
        who=found.who,
        others=found.others,
        spare=len(found.spare),
        epsilon=epsilon,
        delta=delta,
        one_run=audit_one_run(scores, found.included, delta=delta, alpha=alpha, curve=curve),
        counted=count(
            inside[:even], outside[:even], alpha=alpha, epsilon=epsilon, delta=delta, curve=curve
        ),
        noise=tuple(check_noise(game, found.spare)),
        confidence=confidence,
    )
