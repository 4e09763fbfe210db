"""Engines that are broken on purpose where users are protected, as in ``broken_engines``."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import numpy as np
from scipy.stats import binom, binomtest

from dptrain import BandMF, Identity, MatrixMechanism
from dptrain.auditing import run_user_canaries
from dptrain.sampling import AttributionGraph, UserCyclic, UserMinSep
from dptrain.sampling.users.user_cyclic import UserCyclicStream
from dptrain.sampling.users.user_min_sep import UserMinSepStream
from tests.helpers.broken_engines import (
    CHANCE,
    VERDICT,
    Fault,
    coins_alone,
    never_near,
    quieter,
    shown_by_one,
)
from tests.helpers.power import power_against_scaled_noise

K, USERS, SPARE = 4, 200, 2000
LEGIBLE = 0.001  # σ beside which participations can be read


def own(users: int = USERS, k: int = K) -> AttributionGraph:
    """Every user has k examples that are nobody else's."""
    return AttributionGraph.from_lists([[e // k] for e in range(k * users)])


def shared(users: int = USERS, k: int = K) -> AttributionGraph:
    """Example k u + j is of user u, and of the j-th of its k next ones.

    Every user has 2k examples, and two that are at most k apart share some.
    """
    lists = [[u, (u + j + 1) % users] for u in range(users) for j in range(k)]
    return AttributionGraph.from_lists(lists)


MIN_SEP = MatrixMechanism(
    scheme=UserMinSep(graph=own(), probability=0.08, min_sep=3, steps=12, batch_size=50),
    strategy=BandMF(bands=3),
    noise_multiplier=3.0,
)
# All examples of a user have one slot.
CYCLIC = MatrixMechanism(
    scheme=UserCyclic.for_batch_size(
        graph=shared(3 * USERS), batch_size=60, cycle=2 * K, steps=16, method="greedy"
    ),
    strategy=Identity(),
    noise_multiplier=LEGIBLE,
)


# Few enough take part in a turn for it to matter that they are the same ones in the next.
TURNS = MatrixMechanism(
    scheme=UserCyclic.for_batch_size(
        graph=own(600), batch_size=60, cycle=4, steps=16, method="greedy"
    ),
    strategy=Identity(),
    noise_multiplier=LEGIBLE,
)


def users_ignored() -> contextlib.AbstractContextManager[Any]:
    """Batches are drawn from all examples, whichever users they are of."""
    return coins_alone(UserCyclic, lambda scheme: scheme.batch_size / scheme.dataset_size)


def unseparated() -> contextlib.AbstractContextManager[Any]:
    """Who took part is not barred afterwards."""
    return coins_alone(UserMinSep, lambda scheme: scheme.probability)


def one_coin() -> contextlib.AbstractContextManager[Any]:
    """A user's examples come up together, as often as one of them at least should."""
    whole = UserMinSepStream._sample

    def sample(stream: UserMinSepStream) -> Any:
        users = np.unique(whole(stream) // K)
        return (users[:, None] * K + np.arange(K)).ravel()

    return mock.patch.object(UserMinSepStream, "_sample", sample)


def repeated() -> contextlib.AbstractContextManager[Any]:
    """A slot has the same batch in every turn."""
    whole = UserCyclicStream._draw

    def draw(stream: UserCyclicStream) -> Any:
        batches = stream.__dict__.setdefault("batches", {})
        slot = stream.step % stream._scheme.cycle
        if slot not in batches:
            batches[slot] = whole(stream)
        return batches[slot]

    return mock.patch.object(UserCyclicStream, "_draw", draw)


def canaries() -> int:
    """How many users of ``CYCLIC`` are canaries at least: one takes away its 2k neighbors."""
    return 3 * USERS // (2 * K + 1)


def _power_quieter() -> float:
    return power_against_scaled_noise(0.9, runs=SPARE, steps=MIN_SEP.steps, alpha=VERDICT / 3)


def _power_users_ignored() -> float:
    """A user whose 2k examples come up in steps that are too near is proof."""
    scheme: Any = CYCLIC.scheme
    rate = 1 - (1 - scheme.batch_size / scheme.dataset_size) ** (2 * K)
    return shown_by_one(never_near(rate, scheme), canaries=canaries())


def _power_unseparated() -> float:
    scheme: Any = MIN_SEP.scheme
    return shown_by_one(never_near(1 - (1 - scheme.probability) ** K, scheme), canaries=USERS)


def least(trials: int, chance: float, alpha: float) -> int:
    """The fewest hits above what is expected whose two-sided binomial p-value is below alpha."""
    hits = range(int(trials * chance) + 1, trials + 1)
    return next(k for k in hits if binomtest(k, trials, chance).pvalue < alpha)


def _power_one_coin() -> float:
    """Of canaries that are in and take part in a step t = 0, b, 2b, …; all do so with K examples.

    Whether one takes part in these steps is independent: it is a matter of b steps of coins each.
    """
    scheme: Any = MIN_SEP.scheme
    counts = binom.pmf([0, 1], K, scheme.probability)
    several = (1 - counts.sum()) / (1 - counts[0])
    rate = (1 - counts[0]) * counts[0] ** (scheme.min_sep - 1)
    once = 1 - (1 - rate) ** (scheme.steps // scheme.min_sep)
    needed = next(n for n in range(1, USERS) if several**n < CHANCE / 3)
    return float(binom.sf(needed - 1, USERS, once / 2))


def _power_repeated() -> float:
    """In one of the slots; of its users some are in, who take part in both turns of all pairs."""
    scheme: Any = TURNS.scheme
    pairs, users = scheme.steps // scheme.cycle // 2, min(scheme.partition.sizes) // K
    rate = 1 - (1 - scheme.batch_size / max(scheme.partition.sizes)) ** K
    found = 0.0
    for inside in range(1, users + 1):
        findings = 4 * scheme.cycle
        try:
            needed = -(-least(pairs * inside, rate**2, CHANCE / findings) // pairs)
        except StopIteration:
            continue
        found += binom.pmf(inside, users, 0.5) * binom.sf(needed - 1, inside, rate)
    return float(1 - (1 - found) ** scheme.cycle)


USER_FAULTS = {
    "noise": Fault(
        what="nine tenths of the noise, users protected",
        found_by="size of the noise in nobody's coordinates",
        broken=quieter,
        mechanism=MIN_SEP,
        spare=SPARE,
        power=_power_quieter,
        run=run_user_canaries,
    ),
    "users": Fault(
        what="slots regard no users, whose examples have several",
        found_by="who took part, read from a run with hardly any noise",
        broken=users_ignored,
        mechanism=CYCLIC,
        spare=2,
        power=_power_users_ignored,
        run=run_user_canaries,
    ),
    "separation": Fault(
        what="b-min-sep of users bars nobody",
        found_by="who took part, read from a run with hardly any noise",
        broken=unseparated,
        mechanism=MIN_SEP.with_noise(LEGIBLE),
        spare=2,
        power=_power_unseparated,
        run=run_user_canaries,
    ),
    "one coin": Fault(
        what="examples of a user come up together",
        found_by="how many of them do, read from a run with hardly any noise",
        broken=one_coin,
        mechanism=MIN_SEP.with_noise(LEGIBLE),
        spare=2,
        power=_power_one_coin,
        run=run_user_canaries,
    ),
    "repeated": Fault(
        what="a slot of users has the same batch in every turn",
        found_by="who took part twice, read from a run with hardly any noise",
        broken=repeated,
        mechanism=TURNS,
        spare=2,
        power=_power_repeated,
        run=run_user_canaries,
    ),
}
