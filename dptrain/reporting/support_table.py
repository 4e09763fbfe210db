"""Accountants that answer for each scheme, strategy and adjacency: asked, not written down.

``dptrain account --support`` prints the table.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from dptrain.accounting import accountants_for, find_accountants, registered_accountants
from dptrain.core import Adjacency
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import AnySizeScheme, SampledRun, Scheme, scheme_types
from dptrain.strategies import BSR, Dense, Identity, SquareRoot, Strategy

# The run that the accountants are asked about. Costs belong to this size.
STEPS, EXAMPLES, BINS, SEPARATION, BANDS, MANY_BANDS = 800, 40_000, 80, 16, 8, 160


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of one accountant about one pair."""

    accountant: str
    kind: str
    cost: str
    by_name: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """One pair of scheme and class of strategies, under one adjacency.

    Attributes:
        scheme: how the scheme is written.
        answers: the accountants that cover it; those that answer only by name come last.
    """

    scheme: str
    strategy: str
    adjacency: Adjacency
    answers: tuple[Answer, ...]


def representative_schemes(adjacency: Adjacency = Adjacency.ZERO_OUT) -> dict[str, Scheme]:
    """A scheme of every kind, as it is written in the table, with N private under add-remove.

    They are what the registered classes give as their ``representatives``.
    """
    run = SampledRun(
        dataset_size=EXAMPLES,
        steps=STEPS,
        epoch_length=BINS,
        separation=SEPARATION,
        largest_batch=lambda parts: EXAMPLES // BINS + 100,
    )
    found: dict[str, Scheme] = {}
    for name, kind in scheme_types().items():
        for words, scheme in kind.representatives(run).items():
            if not adjacency.public_size and isinstance(scheme, AnySizeScheme):
                scheme = dataclasses.replace(scheme, nominal_size=EXAMPLES)
            found[f"{name}, {words}" if words else name] = scheme
    return found


def representative_strategies() -> dict[str, Strategy]:
    """A strategy of every class, by the words of the table; b is the scheme's separation."""
    return {
        "independent noise": Identity().bind(STEPS),
        "bands ≤ b": BSR(bands=BANDS).bind(STEPS),
        "bands > b": BSR(bands=MANY_BANDS).bind(STEPS),
        "dense": SquareRoot().bind(STEPS),
        "dense, negative entries": Dense(matrix=np.eye(STEPS) - 0.01 * np.tri(STEPS, k=-1)),
    }


def support_table() -> tuple[Row, ...]:
    """Every row, all adjacencies, in the order of the schemes; a second or so the first time.

    Schemes and accountants that were registered by others are in it.
    """
    asked = tuple((type(each), each.name) for each in registered_accountants())
    return _table(asked, tuple(scheme_types().values()))


@functools.cache
def _table(accountants: tuple[Any, ...], kinds: tuple[type[Scheme], ...]) -> tuple[Row, ...]:
    """The rows for what is registered now; the arguments only tell one such state from another."""
    strategies = representative_strategies()
    schemes = {adjacency: representative_schemes(adjacency) for adjacency in Adjacency}
    rows = []
    for name, scheme in schemes[Adjacency.ZERO_OUT].items():
        for words, strategy in strategies.items():
            if words == "bands ≤ b" and strategy.bands > scheme.min_sep:
                continue  # b = 1: there is no such strategy but independent noise
            for adjacency in Adjacency:
                mechanism = MatrixMechanism(
                    scheme=schemes[adjacency][name], strategy=strategy, noise_multiplier=1.0
                )
                answers = _answers(mechanism, adjacency)
                rows.append(Row(name, words, adjacency, answers))
    return tuple(rows)


def _answers(mechanism: MatrixMechanism, adjacency: Adjacency) -> tuple[Answer, ...]:
    found = accountants_for(mechanism, adjacency=adjacency)
    chosen: set[str] = set()
    if any(each.reason is None for each in found):
        chosen = {member.name for member in find_accountants(mechanism, adjacency=adjacency)}
    answers = [
        Answer(each.name, each.kind.value, each.cost.value, each.name not in chosen)
        for each in found
        if each.kind is not None and each.cost is not None
    ]
    return tuple(sorted(answers, key=lambda answer: answer.by_name))


def as_markdown() -> str:
    """The table in Markdown: a row for each scheme, adjacency and set of strategies that agree."""
    groups: dict[tuple[str, Adjacency, tuple[Answer, ...]], list[str]] = {}
    for row in support_table():
        if row.answers:
            groups.setdefault((row.scheme, row.adjacency, row.answers), []).append(row.strategy)
    lines = [
        "| scheme | adjacency | strategy | accountant (kind, cost) | by name |",
        "|---|---|---|---|---|",
    ]
    last: tuple[str, str] = ("", "")
    for (scheme, adjacency, answers), strategies in groups.items():
        head = (scheme, adjacency.value.replace("_", "-"))
        shown = [f"{a.accountant} ({a.kind}, {a.cost})" for a in answers if not a.by_name]
        named = [f"{a.accountant} ({a.cost})" for a in answers if a.by_name]
        left, relation = ("", "") if head == last else (_code(head[0]), head[1])
        lines.append(
            f"| {left} | {relation} | {'; '.join(strategies)} | {'; '.join(shown) or '—'} "
            f"| {'; '.join(named)} |"
        )
        last = head
    lines += [
        "",
        f"Asked at {STEPS} steps, {BINS} steps an epoch, b = {SEPARATION} (`BallsInBins`: {BINS}; "
        f"`Poisson` and others without separation: 1), {BANDS} or {MANY_BANDS} bands (Toeplitz); "
        "b is the separation, the cycle or the number of bins; under add-remove with "
        f"`nominal_size={EXAMPLES}`. Of several accountants the least "
        'answer counts. Those by name have to be asked for: `accountant="..."`.',
    ]
    return "\n".join(lines)


def _code(scheme: str) -> str:
    name, comma, rest = scheme.partition(", ")
    return f"`{name}`{comma}{rest}"
