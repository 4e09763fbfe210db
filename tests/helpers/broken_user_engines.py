"""Engines that are broken on purpose where users are protected, as in ``broken_engines``."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from dptrain import BandMF, Identity, MatrixMechanism, Poisson
from dptrain.auditing import power_against_scaled_noise, run_user_canaries
from dptrain.sampling import AttributionGraph, UserCyclic, UserMinSep
from tests.helpers.broken_engines import VERDICT, Fault, never_near, quieter, shown_by_one

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


def users_ignored() -> contextlib.AbstractContextManager[Any]:
    """Batches are drawn from all examples, whichever users they are of."""

    def stream(scheme: UserCyclic, seed: int) -> Any:
        rate = scheme.batch_size / scheme.dataset_size
        plain = Poisson(probability=rate, dataset_size=scheme.dataset_size, steps=scheme.steps)
        return plain.stream(seed)

    return mock.patch.object(UserCyclic, "stream", stream)


def unseparated() -> contextlib.AbstractContextManager[Any]:
    """Who took part is not barred afterwards."""

    def stream(scheme: UserMinSep, seed: int) -> Any:
        size = scheme.dataset_size
        plain = Poisson(probability=scheme.probability, dataset_size=size, steps=scheme.steps)
        return plain.stream(seed)

    return mock.patch.object(UserMinSep, "stream", stream)


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
}
