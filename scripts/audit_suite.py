"""Every scheme, strategy, clipping style, mode and filter, audited by runs of the real engine.

Each audit trains once on canaries alone (``dptrain.auditing.run_canaries``) and looks for what
contradicts the stated guarantee: by the guesses of one run, by counting, and in the noise. By
default so many combinations are run that every pair of choices occurs that can occur; ``--all``
runs every combination. What the library refuses is counted, with its reason.

What is stated is what a quick accountant says, which for most pairs takes no credit for sampling:
that a bound is tight is for other tests; here the engine has to add the noise, draw, clip and
divide as the mechanism says. With clipping by layers a canary in one layer releases R/√2, so that
its game is weaker than what is stated.

All audits together alarm falsely with a chance of 1e-6 at most (Bonferroni), and seeds are fixed.

Run: PYTHONPATH=. python scripts/audit_suite.py [--all] [--quiet]
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from dptrain import (
    BLT,
    BSR,
    BallsInBins,
    BandMF,
    CyclicPoisson,
    Gradients,
    Identity,
    MatrixMechanism,
    MinSep,
    Poisson,
    RandomAllocation,
    account,
    profile,
)
from dptrain.auditing import CanaryAudit, StatedCurve, audit_canaries, game_of, run_canaries
from dptrain.clipping.base import Automatic, ClippingStyle, Flat, PerGroup, PerLayer
from dptrain.individual import GDPFilter, GDPOdometer, IndividualFilter, RenyiFilter
from dptrain.sampling import Scheme, Shuffled
from dptrain.strategies import (
    BISR,
    BandInvMF,
    ColumnNormalizedBandMF,
    Dense,
    LambdaCGD,
    SquareRoot,
    Strategy,
    Tree,
    TreeRestart,
)
from scripts.covering import all_pairs, covered

CHANCE = 1e-6  # that a right engine fails any audit of the suite
CANARIES, SPARE, STEPS = 300, 400, 12
SIGMA, DELTA = 3.0, 1e-3
_QUICK = ("poisson-pld", "gaussian")  # the first that covers a mechanism
_LARGEST = 4.0  # ε up to which counting is asked to test the stated curve
_GRID = 9

_SIZE = {"dataset_size": CANARIES}
_STEPS = {**_SIZE, "steps": STEPS}
SCHEMES: dict[str, Scheme] = {
    "full batches": Poisson(probability=1.0, **_STEPS),
    "Poisson": Poisson(probability=0.4, **_STEPS),
    "truncated Poisson": Poisson(probability=0.4, max_batch_size=130, **_STEPS),
    "cyclic Poisson": CyclicPoisson(probability=0.5, cycle=3, **_STEPS),
    "truncated cyclic": CyclicPoisson(probability=0.5, cycle=3, max_batch_size=60, **_STEPS),
    "b-min-sep, warm": MinSep(probability=0.3, min_sep=3, **_STEPS),
    "b-min-sep, cold": MinSep(probability=0.3, min_sep=3, warm_start=False, **_STEPS),
    "truncated b-min-sep": MinSep(probability=0.3, min_sep=3, max_batch_size=80, **_STEPS),
    "balls in bins": BallsInBins(bins=4, epochs=3, **_SIZE),
    "random allocation": RandomAllocation(steps_per_epoch=4, participations=1, epochs=3, **_SIZE),
    "shuffled once": Shuffled(batch_size=75, epochs=3, reshuffle=False, **_SIZE),
    "shuffled": Shuffled(batch_size=75, epochs=3, **_SIZE),
}
STRATEGIES: dict[str, Strategy] = {
    type(strategy).__name__: strategy
    for strategy in (
        Identity(),
        BandMF(bands=3),
        BSR(bands=3),
        BLT(buffers=1, theta=(0.5,), omega=(0.25,)),
        BISR(inverse_bands=3),
        BandInvMF(inverse_bands=3),
        LambdaCGD(cancellation=0.5),
        SquareRoot(),
        Tree(),
        TreeRestart(height=2),
        ColumnNormalizedBandMF(bands=3),
        Dense(matrix=np.eye(STEPS) + 0.3 * np.eye(STEPS, k=-1)),
    )
}
CLIPPING: dict[str, ClippingStyle] = {
    "Flat": Flat(),
    "PerLayer": PerLayer(),
    "PerGroup": PerGroup(
        groups={"first": ["layers.0.*"], "second": ["layers.1.*"]},
        shares={"first": 1.0, "second": 2.0},
    ),
    "Automatic": Automatic(),
}
MODES = {mode: mode for mode in ("bookkeeping", "hooks", "functorch")}
_BUDGET = {"target_epsilon": 2.0, "target_delta": DELTA, "max_steps": STEPS}
FILTERS: dict[str, IndividualFilter | None] = {
    "no filter": None,
    "GDPFilter": GDPFilter(**_BUDGET),
    "GDPOdometer": GDPOdometer(increments=(0.7, 0.3), target_delta=DELTA, max_steps=STEPS),
    "RenyiFilter": RenyiFilter(**_BUDGET),
}
AXES: dict[str, dict[str, Any]] = {
    "scheme": SCHEMES,
    "strategy": STRATEGIES,
    "clipping": CLIPPING,
    "mode": MODES,
    "filter": FILTERS,
}
Combination = tuple[str, str, str, str, str]  # a name of each axis


@dataclasses.dataclass(frozen=True)
class Stated:
    """A mechanism, and what is said of it."""

    mechanism: MatrixMechanism
    epsilon: float
    curve: StatedCurve


@functools.cache
def stated(scheme: str, strategy: str) -> Stated:
    """The statement of the first quick accountant of the mechanism that can be audited.

    Raises:
        ValueError: as the library refuses it.
    """
    mechanism = MatrixMechanism(
        scheme=SCHEMES[scheme], strategy=STRATEGIES[strategy], noise_multiplier=SIGMA
    )
    game_of(mechanism)
    for accountant in _QUICK:
        try:
            epsilon = account(mechanism, delta=DELTA, accountant=accountant).epsilon
            break
        except ValueError:
            if accountant == _QUICK[-1]:
                raise
    grid = np.linspace(0.0, min(_LARGEST, 1.5 * epsilon), _GRID)
    found = profile(mechanism, grid, accountant=accountant)
    curve = StatedCurve(epsilon=found.epsilon, remove=found.remove, add=found.add)
    return Stated(mechanism, epsilon, curve)


@functools.cache
def refusal(scheme: str, strategy: str, budget: str) -> str | None:
    """The reason why the library has no such run or audit; ``None`` if it has."""
    try:
        mechanism = stated(scheme, strategy).mechanism
        if (individual := FILTERS[budget]) is not None:
            individual.check(mechanism)
    except ValueError as reason:
        return str(reason)
    return None


def possible() -> tuple[list[Combination], collections.Counter[str]]:
    """The combinations that can be audited, and how many cannot be, by the reason."""
    found: list[Combination] = []
    refused: collections.Counter[str] = collections.Counter()
    for names in itertools.product(*AXES.values()):
        scheme, strategy, clipping, mode, budget = names
        if (reason := refusal(scheme, strategy, budget)) is None:
            found.append((scheme, strategy, clipping, mode, budget))
        else:
            refused[reason.rpartition(": ")[2]] += 1  # without the names that it begins with
    return found, refused


def audited(combination: Combination, *, seed: int, confidence: float) -> CanaryAudit:
    """One run with canaries, and what it shows."""
    scheme, strategy, clipping, mode, budget = combination
    said, individual = stated(scheme, strategy), FILTERS[budget]
    found = run_canaries(
        said.mechanism,
        spare=SPARE,
        gradients=Gradients(mode=mode, clipping=CLIPPING[clipping]),
        individual=individual,
        seed=seed,
        progress=False,
    )
    of_filter = individual is not None
    return audit_canaries(
        said.mechanism,
        found,
        epsilon=individual.target_epsilon if individual is not None else said.epsilon,
        delta=DELTA,
        curve=None if of_filter else said.curve,
        confidence=confidence,
    )


@dataclasses.dataclass(frozen=True)
class Suite:
    """Findings of the audits of a suite.

    Attributes:
        possible: combinations that the library has.
        refused: how many it has not, by its reason.
        audited: those that were run.
        failures: what was found, by the combination.
        seconds: in all.
    """

    possible: Sequence[Combination]
    refused: collections.Counter[str]
    audited: Sequence[Combination]
    failures: dict[Combination, str]
    seconds: float

    def __str__(self) -> str:
        axes = ", ".join(f"{len(values)} of {name}" for name, values in AXES.items())
        pairs, reached = covered(self.possible), covered(self.audited)
        every = covered(itertools.product(*AXES.values()))
        lines = [
            f"choices:       {axes}",
            f"combinations:  {len(self.possible)} supported, {self.refused.total()} refused",
            f"pairs:         {len(reached)} of the {len(pairs)} that are supported "
            f"({len(every) - len(pairs)} of {len(every)} are refused)",
            f"audits:        {len(self.audited)}, {len(self.failures)} failed, "
            f"{self.seconds:.0f} s",
            "refused:",
            *(f"  {count:5d}  {reason}" for reason, count in self.refused.most_common()),
        ]
        lines += [f"FAILED: {', '.join(key)}: {why}" for key, why in self.failures.items()]
        return "\n".join(lines)


def run(*, every: bool = False, progress: bool = True) -> Suite:
    """Audit a cover of all pairs, or every combination.

    Args:
        every: all combinations instead of a cover.
        progress: show a bar.
    """
    start = time.perf_counter()
    combinations, refused = possible()
    chosen = combinations if every else all_pairs(combinations)
    confidence = 1.0 - CHANCE / len(chosen)
    failures = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of guarantees that are estimates, of a fixed seed
        for seed, combination in enumerate(tqdm(chosen, disable=not progress, unit="audit")):
            try:
                violations = audited(combination, seed=seed, confidence=confidence).violations
            except (ValueError, RuntimeError) as error:
                violations = (f"it does not run: {error}",)
            if violations:
                failures[combination] = "; ".join(violations)
    return Suite(combinations, refused, chosen, failures, time.perf_counter() - start)


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was audited; the exit status is 1 if an audit failed."""
    parser = argparse.ArgumentParser(prog="scripts/audit_suite.py", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pairs", action="store_true", help="every pair of choices (default)")
    which.add_argument("--all", action="store_true", help="every combination, for a night")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(argv)
    found = run(every=options.all, progress=not options.quiet)
    print(found)
    return int(bool(found.failures))


if __name__ == "__main__":
    sys.exit(main())
