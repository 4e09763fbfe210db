"""The rows of a plan for users, and how it is printed."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

from dptrain.core import Kind, aligned
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import PerUser, Scheme
from dptrain.strategies import PREFIX_SUMS, Identity, Strategy

_SHOWN = 12  # rows of a printed plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserRow:
    """One way to train, at the noise that the target requires.

    Attributes:
        bound: k, the most examples of a user; ``None`` where nobody's examples are left out, as a
            user's mean is clipped and not each example.
        duplicates: whether copies fill up users below k.
        kept: the share of the different examples that a run can draw.
        scheme: the scheme's settings, as its ``for_batch_size`` takes them.
        mechanism: scheme, strategy and σ.
        accountant: who proved it.
        kind: how.
        rmse: root mean square error of the workload's queries per unit of σ.
        batch_size: B̄ of ``for_batch_size``: examples, or users whose mean is clipped.
        parts: the mean over users of 1/g, g being how many examples the mean is over that is
            clipped; 1 where examples are clipped one by one.
        alignment: of two gradients of one user, see ``norm``.
    """

    bound: int | None
    duplicates: bool
    kept: float
    scheme: dict[str, Any]
    mechanism: MatrixMechanism
    accountant: str
    kind: Kind
    rmse: float
    batch_size: float
    parts: float = 1.0
    alignment: float = 1.0

    @property
    def norm(self) -> float:
        """The root mean square length of what is clipped, in lengths of an example's gradient.

        With gradients of mean square R², and a·R² the mean inner product of two of one user
        (the alignment a), the mean over g of them has mean square (1/g + (1 - 1/g)·a)·R².
        """
        return math.sqrt(self.parts + (1.0 - self.parts) * self.alignment)

    @property
    def error(self) -> float:
        """RMSE·σ/B̄ times ``norm``, the error of the means that the optimizer gets.

        Per unit of the clipping norm of examples; B̄ counts what is clipped.
        """
        sigma = self.mechanism.noise_multiplier
        return self.norm * self.rmse * sigma / self.mechanism.scheme.expected_batch_size

    @property
    def cost(self) -> float:
        """``error`` over ``kept``; rows are compared by it."""
        return self.error / self.kept

    def breaks_even(self, cost: float) -> float | None:
        """The alignment at which ``cost`` is this row's; ``None`` where it depends on none.

        Above 1 the row's is less whatever the alignment, and below 0 it is more.
        """
        if self.parts == 1.0:
            return None
        square = (cost / self.cost * self.norm) ** 2
        return (square - self.parts) / (1.0 - self.parts)

    @property
    def limit(self) -> str:
        """The bound on a user's contribution: ``"k=2"``, ``"k=2, copies"`` or ``"means of 4"``."""
        scheme = self.mechanism.scheme
        if isinstance(scheme, PerUser):
            return f"means of {scheme.group_size}"
        return f"k={self.bound}{', copies' * self.duplicates}"

    @property
    def name(self) -> str:
        """The scheme as a user writes it, without graph and batch size."""
        settings = ", ".join(f"{key}={_short(value)}" for key, value in self.scheme.items())
        return f"{type(self.mechanism.scheme).__name__}({settings})"

    @property
    def strategy_name(self) -> str:
        """The strategy and its bands."""
        strategy = self.mechanism.strategy
        return f"{type(strategy).__name__}({strategy.bands})"

    @property
    def code(self) -> list[str]:
        """Lines of code that make scheme and strategy of a graph named ``graph``."""
        scheme, lines, graph = self.mechanism.scheme, [], "graph"
        if self.bound is not None:
            copies = ", duplicates=True" if self.duplicates else ""
            lines.append(f"bounded = graph.bound({self.bound}{copies}, seed=0)")
            graph = "bounded.graph"
        settings = "".join(f", {key}={value!r}" for key, value in self.scheme.items())
        size = f"{self.batch_size!r}".removesuffix(".0")
        return [
            *lines,
            f"scheme = {type(scheme).__name__}.for_batch_size("
            f"graph={graph}, batch_size={size}, steps={scheme.steps}{settings})",
            f"strategy = {_call(self.mechanism.strategy)}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready figures."""
        scheme = self.mechanism.scheme
        return {
            "max_examples": self.bound,
            "duplicates": self.duplicates,
            "kept": self.kept,
            "rows": scheme.dataset_size,
            "clipped": _clipped(scheme),
            "batch_size": self.batch_size,
            "scheme": {"type": type(scheme).__name__, **self.scheme},
            "strategy": self.mechanism.strategy.to_dict(),
            "accountant": self.accountant,
            "kind": self.kind.value,
            "noise_multiplier": self.mechanism.noise_multiplier,
            "rmse": self.rmse,
            "norm": self.norm,
            "error": self.error,
            "error_over_kept": self.cost,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserPlan:
    """The schemes and strategies that were compared; ``print`` it.

    Attributes:
        epsilon, delta, batch_size, steps, alignment: the question.
        examples, users: of the graph before bounding.
        rows: by ``cost``, the least first.
        skipped: what could not be computed, and why.
    """

    epsilon: float
    delta: float
    batch_size: int
    steps: int
    alignment: float
    examples: int
    users: int
    rows: tuple[UserRow, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def best(self) -> UserRow:
        """The row of least cost."""
        return self.rows[0]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value."""
        asked = ("epsilon", "delta", "batch_size", "steps", "alignment", "examples", "users")
        return {
            **{name: getattr(self, name) for name in asked},
            "rows": [row.to_dict() for row in self.rows],
            "skipped": [list(pair) for pair in self.skipped],
        }

    def to_markdown(self, most: int | None = None) -> str:
        """A Markdown table of the first ``most`` rows; ``*`` marks the best."""
        lines = [
            "| k | copies | kept | scheme | strategy | σ | RMSE·σ/B̄ | over kept |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows[:most]:
            star = "* " if row is self.best else ""
            bound = "all" if row.bound is None else row.bound
            lines.append(
                f"| {star}{bound} | {'yes' if row.duplicates else 'no'} | {row.kept:.1%} "
                f"| {row.name} | {row.strategy_name} | {row.mechanism.noise_multiplier:.4g} "
                f"| {row.error:.4g} | {row.cost:.4g} |"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        parts = [
            f"ε = {self.epsilon:g}, δ = {self.delta:g} for every user; {self.examples:,} examples "
            f"of {self.users:,} users; {self.batch_size} examples a step on average, "
            f"n = {self.steps} steps.",
            "",
            aligned(self.to_markdown(_SHOWN), left=5),
        ]
        if len(self.rows) > _SHOWN:
            parts.append(f"and {len(self.rows) - _SHOWN} more, with --json")
        parts += [
            "",
            "Compared by the error of the average gradient over the share of the examples that are "
            "kept: fewer examples mean less to learn from, which no error of noise shows.",
            *self._means,
        ]
        if any(row.accountant.startswith("revealed-draws") for row in self.rows):
            parts.append(
                "UserMinSep stands with what is proven without samples: 'dptrain calibrate' may "
                "find less noise for it where few of its steps are exposed."
            )
        if self.skipped:
            parts += ["", "Not computed:", *in_lines(self.skipped)]
        best = self.best
        parts += [
            "",
            f"Best (*): σ = {best.mechanism.noise_multiplier:.5g} ({best.kind.value}). To train "
            "with it:",
            *(f"  {line}" for line in best.code),
        ]
        return "\n".join(parts)

    @functools.cached_property
    def _means(self) -> list[str]:
        """Sentences about rows that clip users' means, beside rows that clip examples."""
        if all(_clipped(row.mechanism.scheme) == "examples" for row in self.rows):
            return []
        lines = [
            "PerUser clips the mean over up to group_size examples of a user, once, and divides by "
            "users: as many examples a step, in fewer vectors. Two gradients of one user are taken "
            f"to have alignment={self.alignment:g} (1: alike, 0: orthogonal), which says how long "
            "their mean is. All users weigh the same, as copies would have it."
        ]
        single = [row for row in self.rows if row.parts == 1.0]
        grouped = [(row.breaks_even(single[0].cost), row) for row in self.rows] if single else []
        known = [(found, row) for found, row in grouped if found is not None]
        if known:
            limit, row = max(known, key=lambda pair: pair[0])
            where = (
                "whatever the alignment" if limit >= 1.0 else f"at an alignment below {limit:.2f}"
            )
            lines.append(
                f"{row.name} with {row.strategy_name} has less error than the best row of single "
                f"examples {where if limit > 0.0 else 'at no alignment'}."
            )
        return lines


def in_lines(skipped: Sequence[tuple[str, str]], most: int = 12) -> list[str]:
    """One line for each reason, with what it is about; after ``most`` lines, how many are left."""
    about: dict[str, list[str]] = {}
    for what, why in skipped:
        about.setdefault(_brief(why), []).append(what)
    found = [
        f"- {whats[0]}{f' and {len(whats) - 1} more' if len(whats) > 1 else ''}: {why}"
        for why, whats in about.items()
    ]
    more = len(found) - most
    return [*found[:most], *([f"and {more} more reasons"] if more > 0 else [])]


def _clipped(scheme: Scheme) -> str:
    return "users" if isinstance(scheme, PerUser) else "examples"


def _short(value: Any) -> str:
    """A mapping of a scheme as its call."""
    if not isinstance(value, dict):
        return str(value)
    inner = ", ".join(f"{key}={each}" for key, each in value.items() if key != "type")
    return f"{value['type']}({inner})" if inner else str(value["type"])


def _brief(reason: str) -> str:
    """The fault that a reason names, without who says so, how it comes, and what would help."""
    owner, colon, rest = reason.partition(": ")
    text = rest if colon and owner.isidentifier() else reason
    return re.split(r"; |\. |, as | \(at ", text, maxsplit=1)[0]


def _call(strategy: Strategy) -> str:
    if isinstance(strategy, Identity):
        return "Identity()"
    workload = getattr(strategy, "workload", PREFIX_SUMS)
    told = "" if workload == PREFIX_SUMS else f", workload={workload!r}"
    return f"{type(strategy).__name__}(bands={strategy.bands}{told})"
