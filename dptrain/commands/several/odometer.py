"""``dptrain odometer``: a total budget over releases that are chosen one after the other."""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dptrain.accounting import BudgetFilter, Charge, ComposedRuns
from dptrain.commands.arguments import add_adjacency
from dptrain.commands.outputs import check_outputs, plain_epsilon, write_json
from dptrain.commands.parser import CommandParser, declare
from dptrain.commands.several.ledger import (
    BudgetLedger,
    LedgerBudget,
    LedgerEntry,
    append,
    locked_ledger,
    now,
    open_ledger,
    read_ledger,
)
from dptrain.commands.several.run_files import KnownRun, check_same, how_shown, read_runs
from dptrain.contrib.selection import epsilon_of, weakest_kind
from dptrain.core import Adjacency, Kind, aligned, checks

_CALIBRATE = r"""
dptrain calibrate --scheme Poisson batch_size=500 --strategy Identity --dataset-size 50000 \
    --epochs 10 --epsilon 1 --delta 1e-6 --out first.json
dptrain odometer open budget.jsonl --epsilon 4 --delta 1e-5 --data-set people"""
_EXAMPLE = f"""{_CALIBRATE}
dptrain odometer add budget.jsonl first.json
dptrain odometer show budget.jsonl"""

ASSUMED = (
    "each release was charged in full before it began, and was over before the mechanism of the "
    "next was chosen; releases that run at the same time are not covered",
    "what was refused was not made, and these are all releases of these data, those that failed or "
    "were thrown away included",
    "the releases' random numbers are independent: no two share a seed",
    "nobody is more than one unit of the data",
)


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "odometer", help=_TEXT, description=_TEXT, epilog=_LIMITS, example=_EXAMPLE
    )
    actions = parser.add_subparsers(dest="action", required=True)
    _add_open(actions)
    _add_add(actions)
    _add_show(actions)
    _add_check(actions)


_TEXT = "Keep a total privacy budget over releases that are chosen one after the other."
_LIMITS = (
    "Add each release before it begins, and do not make it if it does not fit. Its noise, too, "
    "may be chosen by looking at earlier releases, which dptrain compose does not cover."
)


def _declare(actions: Any, name: str, run: Callable[..., Any], example: str = "") -> CommandParser:
    """Declare an action on a ledger."""
    parser = declare(actions, name, run, example=example or _EXAMPLE)
    parser.add_argument("ledger", type=pathlib.Path, metavar="LEDGER", help="the ledger's file")
    return parser


def _add_open(actions: Any) -> None:
    parser = _declare(actions, "open", run_open, _CALIBRATE)
    parser.add_argument("--epsilon", type=float, required=True, help="ε of all releases together")
    parser.add_argument("--delta", type=float, required=True, help="δ of all releases together")
    parser.add_argument(
        "--share",
        type=float,
        default=0.5,
        help="share of δ that covers the amount by which the releases' curves exceed Gaussian ones",
    )
    parser.add_argument("--data-set", help="name of the data in the ledger")
    parser.add_argument(
        "--unit",
        choices=("example", "user"),
        help="accept only releases that protect this unit (default: the unit of the first)",
    )
    add_adjacency(parser, "the neighboring relation of all releases (default: that of the first)")


def _add_add(actions: Any) -> None:
    parser = _declare(actions, "add", run_add)
    parser.add_argument(
        "release",
        type=pathlib.Path,
        metavar="RUN",
        help="a mechanism, statement or summary as JSON, or a run's folder",
    )
    parser.add_argument(
        "--slack",
        type=float,
        help="d, the δ that this release may use (default: a tenth of the rest, or the smallest "
        "possible)",
    )
    parser.add_argument(
        "--overlapping",
        action="store_true",
        help="its data set has another size but may share people, each at most one unit of it",
    )


def _add_show(actions: Any) -> None:
    parser = _declare(actions, "show", run_show)
    parser.add_argument("--delta", type=float, help="δ of the figures (default: the ledger's)")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")


def _add_check(actions: Any) -> None:
    parser = _declare(
        actions, "check", run_check, f"{_CALIBRATE}\ndptrain odometer check budget.jsonl"
    )
    parser.add_argument(
        "--last",
        metavar="HASH",
        help="the last hash that was noted down: the ledger must contain its line",
    )


def run_open(options: argparse.Namespace) -> None:
    """Begin a ledger with a total (ε, δ)."""
    found = BudgetFilter.of(epsilon=options.epsilon, delta=options.delta, share=options.share)
    ledger = open_ledger(
        options.ledger,
        LedgerBudget(
            date=now(),
            data_set=options.data_set,
            epsilon=options.epsilon,
            delta=options.delta,
            mu=found.mu,
            slack=found.slack,
            unit=options.unit,
            adjacency=None if options.adjacency is None else Adjacency(options.adjacency),
        ),
    )
    print(
        f"{options.ledger}: a total of (ε = {options.epsilon:g}, δ = {options.delta:g}), which is "
        f"μ = {found.mu:.6g} and d = {found.slack:.6g}.\n{_last(ledger)}"
    )


def run_add(options: argparse.Namespace) -> int:
    """Charge a release before it begins; exit status 1 if it does not fit."""
    ledger = read_ledger(options.ledger)
    if options.slack is not None:
        checks.number("--slack", options.slack, above=0, below=1)
    # Of a mechanism that only a simulation answers for one (ε, δ) is known, and d is above that δ.
    share = 0.999 * (options.slack or ledger.filter.left.slack / 10) or None
    (run,) = read_runs([options.release], delta=share, adjacency=ledger.adjacency)
    with locked_ledger(options.ledger) as (ledger, file):
        _check_fits_in(ledger, run, overlapping=options.overlapping)
        try:
            charge = ledger.filter.price(run.limits, slack=options.slack)
        except ValueError as error:
            raise ValueError(f"{options.release}: {error}") from error
        if not ledger.filter.fits(charge):
            print(_refusal(ledger, run, charge), file=sys.stderr)
            return 1
        before = [each.mechanism_hash for each in ledger.entries]
        append(
            ledger,
            file,
            LedgerEntry(
                date=now(),
                name=run.name,
                charge=charge,
                limits=run.limits,
                unit=run.unit,
                adjacency=run.adjacency,
                data=run.data,
                overlapping=options.overlapping,
                mechanism_hash=run.guarantee.mechanism_hash,
                failure_probability=run.failure_probability,
            ),
        )
    print(
        f"{run.name} is charged μ = {charge.mu:.6g}, d = {charge.slack:.3g}. {_left(ledger)}\n"
        f"{_last(ledger)}"
    )
    if run.guarantee.mechanism_hash in before:
        print("The same mechanism was charged before, so this is one more run of it.")
    if run.guarantee.steps_executed:
        print(
            "It says that it has run already, and a release is to be added before it begins: the "
            "total holds only if this one would have been added whatever came out of it, and "
            "before anything that was chosen by its results."
        )
    return 0


def _check_fits_in(ledger: BudgetLedger, run: KnownRun, *, overlapping: bool) -> None:
    """Refuse a release that the ledger's statement cannot be about."""
    budget = ledger.budget
    if budget.unit is not None and budget.unit != run.unit.kind:
        raise ValueError(
            f"{run.name} protects a {run.unit.noun}, but the ledger was opened for --unit "
            f"{budget.unit}: keep another ledger for it"
        )
    if budget.adjacency is not None and budget.adjacency is not run.adjacency:
        raise ValueError(
            f"{run.name} has adjacency={run.adjacency.value!r}, but the ledger was opened for "
            f"{budget.adjacency.value!r}: account for the run under that relation"
        )
    check_same(
        [*ledger.entries[:1], run],
        overlapping=overlapping,
        disjoint=False,
        apart="if nobody is in two of them, the other set has a ledger of its own",
    )


def _refusal(ledger: BudgetLedger, run: KnownRun, charge: Charge) -> str:
    return (
        f"dptrain odometer: {run.name} is refused: it takes μ = {charge.mu:.6g}, d = "
        f"{charge.slack:.3g}, which does not fit. {_left(ledger)} Do not make this release: add "
        "one with more noise or fewer steps instead. If it was already made, the total of the "
        "ledger no longer holds for these data."
    )


def _left(ledger: BudgetLedger) -> str:
    left, delta = ledger.filter.left, ledger.budget.delta
    return (
        f"Left are μ = {left.mu:.6g}, d = {left.slack:.3g}: room for a Gaussian release of "
        f"ε = {epsilon_of(Charge(mu=left.mu, slack=0.0), delta):.4g} at δ = {delta:.3g}."
    )


def _last(ledger: BudgetLedger) -> str:
    return (
        f"Last hash: {ledger.hashes[-1]}. Note it down: without it, nobody can detect that the "
        "last line was changed or that lines were removed at the end."
    )


def run_show(options: argparse.Namespace) -> None:
    """Show what was charged and what is left."""
    check_outputs(options.json)
    ledger = read_ledger(options.ledger)
    budget, entries = ledger.budget, ledger.entries
    delta = budget.delta
    if options.delta is not None:
        delta = checks.number("--delta", options.delta, above=0, below=1)
    total = ledger.filter.epsilon(delta) if options.delta is not None else budget.epsilon
    kind = weakest_kind([each.limits for each in entries])
    rows = _rows(ledger)
    figures: dict[str, Any] = {
        "data_set": budget.data_set,
        "epsilon": plain_epsilon(total),
        "delta": delta,
        "kind": kind.value,
        "mu": budget.mu,
        "slack": budget.slack,
        "left": {"mu": ledger.filter.left.mu, "slack": ledger.filter.left.slack},
        "releases": rows,
        "last_hash": ledger.hashes[-1],
        "assumes": list(ASSUMED),
    }
    print(_sentence(ledger, total, delta, kind))
    if entries:
        print(f"\n{_table(rows)}\n")
        together = ComposedRuns([each.limits for each in entries])
        figures["if_planned"] = planned = {
            "charges": plain_epsilon(epsilon_of(ledger.filter.spent, delta)),
            "composed": plain_epsilon(together.epsilon(delta)),
            "basic": plain_epsilon(together.added_up(delta)),
        }
        charged, composed, basic = (_number(value) for value in planned.values())
        print(
            f"Had these releases, and no others, been fixed before the first result, they would be "
            f"ε = {charged} at δ = {delta:.3g} by their charges, {composed} composed as dptrain "
            f"compose does, and {basic} by basic composition (Σ ε at equal shares of δ). Where one "
            "was chosen by the results of another, only the total holds."
        )
    print(f"{_left(ledger)}\n\nIt assumes that")
    print("\n".join(f"- {line}" for line in ASSUMED))
    print(_last(ledger))
    write_json(options.json, figures)


def _sentence(ledger: BudgetLedger, epsilon: float, delta: float, kind: Kind) -> str:
    name = f" of {ledger.budget.data_set}" if ledger.budget.data_set else ""
    if not ledger.entries:
        return f"Nothing has been released{name}. {_limit(epsilon, delta)}"
    first = ledger.entries[0]
    how = how_shown(kind, [each.failure_probability for each in ledger.entries])
    return (
        f"All releases{name}, those to come included, each chosen by the results of those before, "
        f"protect each {first.unit.noun} ({first.adjacency.value}): "
        f"{first.adjacency.sentence(first.unit)}. {_limit(epsilon, delta)} This is {how}."
    )


def _limit(epsilon: float, delta: float) -> str:
    if not math.isfinite(epsilon):
        return f"At δ = {delta:.6g} there is no guarantee: use a larger --delta."
    return f"The total is (ε = {epsilon:.6g}, δ = {delta:.6g})."


def _number(value: float | str) -> str:
    return "∞" if isinstance(value, str) else f"{value:.5g}"


def _rows(ledger: BudgetLedger) -> list[dict[str, Any]]:
    passing = BudgetFilter(mu=ledger.budget.mu, slack=ledger.budget.slack)
    rows = []
    for each in ledger.entries:
        passing.spend(each.charge)
        rows.append(
            {
                "date": each.date,
                "name": each.name,
                "mu": each.charge.mu,
                "slack": each.charge.slack,
                "left_mu": passing.left.mu,
                "left_slack": passing.left.slack,
                "kind": each.limits.kind.value,
                "mechanism_hash": each.mechanism_hash,
            }
        )
    return rows


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| date | release | μ | d | μ left | d left | shown |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = (f"{row[name]:.4g}" for name in ("mu", "slack", "left_mu", "left_slack"))
        lines.append(f"| {row['date']} | {row['name']} | {' | '.join(figures)} | {row['kind']} |")
    return aligned("\n".join(lines), left=2)


def run_check(options: argparse.Namespace) -> None:
    """Check every line of a ledger and the hashes that join them."""
    ledger = read_ledger(options.ledger)
    count = len(ledger.entries)
    if options.last is not None and options.last not in ledger.hashes:
        raise ValueError(
            f"{options.ledger}: no line has the hash {options.last}: the ledger was changed or "
            "shortened after that hash was noted down, so it proves nothing"
        )
    print(
        f"{options.ledger}: {count} release{'' if count == 1 else 's'}; the hashes of all lines "
        "match, every charge follows from its curve, and the sums are within the budget."
    )
    if options.last is not None:
        print(
            f"{len(ledger.hashes) - 1 - ledger.hashes.index(options.last)} lines were added since."
        )
    print(_last(ledger))
