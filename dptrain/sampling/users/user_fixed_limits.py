"""The tightest limits on users under which unamplified batches can still all be filled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from dptrain.core import checks
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.user_fixed import UserFixed


def largest_min_sep(
    graph: AttributionGraph,
    *,
    batch_size: int,
    steps: int,
    seed: int,
    max_participations: int | None = None,
) -> UserFixed:
    """The scheme with the largest b at which the run with this seed fills every batch.

    Reads only the public graph. Found by bisection, as if a smaller b never made a batch smaller;
    where the greedy choice breaks that, a larger b may exist. The b that is returned was tried.

    Args:
        graph: with its edges.
        batch_size: examples in every batch.
        steps: n.
        seed: of the run.
        max_participations: m; no limit of its own if left out.

    Raises:
        ValueError: if an argument is out of range, or not even b = 1 fills every batch.
    """
    steps = checks.steps(steps, owner="UserFixed")
    make = functools.partial(UserFixed, graph=graph, batch_size=batch_size, steps=steps)
    most: Any = max_participations
    return _last_full(lambda b: make(min_sep=b, max_participations=most), steps, seed)


def largest_batch_size(
    graph: AttributionGraph,
    *,
    min_sep: int,
    steps: int,
    seed: int,
    max_participations: int | None = None,
) -> UserFixed:
    """The scheme with the largest batches of which the run with this seed fills every one.

    Reads only the public graph; by bisection, as in ``largest_min_sep``.
    """
    make = functools.partial(UserFixed, graph=graph, min_sep=min_sep, steps=steps)
    most: Any = max_participations
    return _last_full(
        lambda size: make(batch_size=size, max_participations=most), graph.examples, seed
    )


def fewest_participations(
    graph: AttributionGraph, *, batch_size: int, min_sep: int, steps: int, seed: int
) -> UserFixed:
    """The scheme with the smallest m at which the run with this seed fills every batch.

    Reads only the public graph; by bisection, as in ``largest_min_sep``.
    """
    loosest = UserFixed(graph=graph, batch_size=batch_size, min_sep=min_sep, steps=steps)
    most = loosest.max_participations
    return _last_full(
        lambda i: dataclasses.replace(loosest, max_participations=most + 1 - i), most, seed
    )


def _last_full(scheme: Callable[[int], UserFixed], last: int, seed: int) -> UserFixed:
    """The scheme of the last i in 1..``last`` with full batches, if that of 1 has them."""
    _require_full(scheme(1), seed)
    full, short = 1, last + 1
    while short - full > 1:
        middle = (full + short) // 2
        if _is_full(scheme(middle), seed):
            full = middle
        else:
            short = middle
    return scheme(full)


def _is_full(scheme: UserFixed, seed: int) -> bool:
    title = (
        f"trying batch_size={scheme.batch_size}, min_sep={scheme.min_sep}, "
        f"max_participations={scheme.max_participations}"
    )
    batches = tqdm(scheme.stream(seed), total=scheme.steps, desc=title, delay=2, leave=False)
    return all(len(batch) == scheme.batch_size for batch in batches)


def _require_full(scheme: UserFixed, seed: int) -> None:
    fill = scheme.check(seed)
    if fill.short_steps:
        raise ValueError(
            f"UserFixed: with min_sep={scheme.min_sep} and max_participations="
            f"{scheme.max_participations}, {fill.short_steps} of {scheme.steps} batches have fewer "
            f"than batch_size={scheme.batch_size} examples (the smallest {fill.smallest}, the "
            f"first at step {fill.first_short_step}); lower batch_size, min_sep or steps, or raise "
            "max_participations"
        )
