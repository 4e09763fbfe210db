"""Work that a step asks a device for: operators, views, waits and Python calls, beside ordinary.

Counted in one process, on any processor, whatever else it does:

- *work*: operators that read or write numbers, each of which is a launch on a GPU;
- *views*: operators that only look at a tensor in another way;
- *waits*: operators whose result the host has to know before it goes on, such as ``item`` or
  a boolean index, until the update of the parameters has been asked for;
- *calls*: of Python functions.

Each is the least of several steps. A private run looks more closely at its first steps, and at some
later ones that it draws at random; these are not counted.

The processor takes the ways of a device meanwhile, unless ``--processor`` is given: work is not
divided into parts that fit its caches.

    PYTHONPATH=. python scripts/bench/launches.py [--models mlp vgg bert] [--json FILE]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from dptrain.core import as_on_a_device
from scripts import results
from scripts.bench.step_models import CASES
from scripts.bench.step_sides import ORDINARY, Side, open_side, quiet, reason

MODELS = ("mlp", "mnist", "vgg", "bert", "gpt2")
SIDES = (ORDINARY, "opacus-hooks", "bookkeeping", "bookkeeping-banded")
KINDS = ("work", "views", "waits", "calls")
STEPS = 3
_TIMES = "{%s.times.work:.1f}, {%s.times.calls:.1f}"
COLUMNS = [
    ["model", "{model}"],
    ["ordinary step: work, calls", "{ordinary.work:,}, {ordinary.calls:,}"],
    ["Opacus's hooks", _TIMES % (("opacus-hooks",) * 2)],
    ["private", _TIMES % (("bookkeeping",) * 2)],
    ["private, 16 bands", _TIMES % (("bookkeeping-banded",) * 2)],
    ["waits of the private step", "{bookkeeping.more}"],
]
# Their results are numbers, or have as many as a tensor's numbers say.
# What the host does by itself: memory is taken, and a tensor gets another shape.
_NO_LAUNCH = frozenset(
    {
        "_record_function_enter_new",
        "_record_function_exit",
        "_unsafe_view",
        "empty",
        "empty_like",
        "new_empty",
        "promote_types",
        "squeeze_",
    }
)
_WAITS = frozenset(
    {
        "_local_scalar_dense",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    }
)


class Operators(TorchDispatchMode):
    """Counts operators by kind, and by name those that work or wait."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: collections.Counter[str] = collections.Counter()
        self.names: collections.Counter[str] = collections.Counter()
        self.updated = False

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.split("::")[-1]
        if name in _NO_LAUNCH:
            return func(*args, **(kwargs or {}))
        kind = "waits" if name in _WAITS or _indexes(name, args) else "work"
        if kind == "work" and func.is_view:
            kind = "views"
        if kind == "waits" and self.updated:
            return func(*args, **(kwargs or {}))
        self.kinds[kind] += 1
        if kind != "views":
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def _indexes(name: str, args: Any) -> bool:
    """True for an index whose length a boolean tensor says."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(each is not None and each.dtype == torch.bool for each in args[1])


def counted(side: Side) -> tuple[dict[str, int], collections.Counter[str]]:
    """A step's counts, and operators of one step by name."""
    found: dict[str, int] = {}
    names: collections.Counter[str] = collections.Counter()
    for _ in range(STEPS):
        side.prepare()
        operators = Operators()

        def updated(*_: Any, found: Operators = operators) -> None:
            found.updated = True

        handle = register_optimizer_step_post_hook(updated)
        try:
            with operators:
                side.step()
        finally:
            handle.remove()
        calls = _calls(side)
        for kind in KINDS:
            value = calls if kind == "calls" else operators.kinds[kind]
            found[kind] = min(value, found.get(kind, value))
        if not names or operators.names.total() < names.total():
            names = operators.names
    return found, names


def _calls(side: Side) -> int:
    """Python functions that the calling thread calls in a step."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    side.prepare()
    sys.setprofile(note)
    try:
        side.step()
    finally:
        sys.setprofile(None)
    return count


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each model, with multiples of what ordinary training asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=sorted(CASES))
    parser.add_argument("--sides", nargs="+", default=SIDES)
    parser.add_argument("--processor", action="store_true", help="count a processor's own way")
    parser.add_argument("--names", type=int, default=0, help="operators to list, most first")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(argv)
    quiet()
    torch.set_num_threads(1)  # operators of other threads are not seen
    way = contextlib.nullcontext() if options.processor else as_on_a_device()
    with way:
        rows = [_row(model, options) for model in options.models]
    results.publish(
        options.json,
        {"launches": results.Table(COLUMNS, rows)},
        script=__file__,
        machine=results.machine("torch", "opacus"),
    )


def _row(model: str, options: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model}
    for name in dict.fromkeys((ORDINARY, *options.sides)):
        try:
            found, names = counted(open_side(name, model, "cpu"))
        except Exception as error:
            print(f"{model:10} {name:20} {reason(error)}", file=sys.stderr, flush=True)
            continue
        ordinary = row.get(ORDINARY, found)
        times = {kind: found[kind] / max(1, ordinary[kind]) for kind in KINDS}
        row[name] = {**found, "times": times, "more": found["waits"] - ordinary["waits"]}
        shown = "  ".join(f"{kind} {found[kind]:6,} ({times[kind]:4.1f}×)" for kind in KINDS)
        print(f"{model:10} {name:20} {shown}", file=sys.stderr, flush=True)
        if options.names:
            listed = ", ".join(f"{key} {value}" for key, value in names.most_common(options.names))
            print(f"   {listed}", file=sys.stderr)
    return row


if __name__ == "__main__":
    main()
