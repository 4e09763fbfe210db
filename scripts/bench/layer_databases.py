"""Per-example gradients of peers' layer databases: how many come out right, refused and wrong.

Three databases: torch's modules (``module_db``), torch's operators (``op_db``), and random layers
of the kinds that Opacus tests. Each case is a model of one layer, run by the engine in bookkeeping
mode, and its norms and clipped sums are held against one example at a time by plain autograd:

    PYTHONPATH=. python scripts/bench/layer_databases.py --samples 4 \\
        --json scripts/bench/results/layer_databases.json
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import logging
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import opacus
import torch
from opacus.layers import DPMultiheadAttention, SequenceBias
from torch import Tensor, nn
from torch.utils import _pytree
from tqdm import tqdm

from scripts import results
from scripts.attack.layers import LAYERS, Made
from tests.coverage.case import ROWS, Case, first
from tests.coverage.harness import WITHOUT, built, examine, private_run
from tests.helpers.clipping_oracle import reference, row_losses
from tests.helpers.refusals import refuses
from tests.helpers.torch_databases import modules, operators

DTYPE = torch.float64
TARGETS = torch.tensor([0.5, -3.0, 20.0], dtype=DTYPE)
# Calls that end the process in torch 2.13 where statistics have another size than the channels.
CRASHING = {"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"}
MEET = 1e-9  # relative: rows that differ by more from the same rows alone are not apart


@dataclasses.dataclass(frozen=True)
class Found:
    """The outcome of a case.

    Attributes:
        database: ``"modules"``, ``"operators"`` or ``"layers"``.
        name: the layer and its sample.
        outcome: ``"right"``, ``"refused"``, ``"wrong"``, ``"crashed"``, or ``"left out"``: a call
            that has no rows, or without a gradient.
        reason: of all but the right ones.
        meet: whether the rows of the call do meet, so that it has to be refused.
    """

    database: str
    name: str
    outcome: str
    reason: str = ""
    meet: bool = False


class NoRows(ValueError):
    """A call that is not made of rows, or cannot be made with one."""


class Called(nn.Module):
    """A call with what belongs to rows given by name, each with its rows first.

    Args:
        body: a module, or a function.
        tree: the arguments and keyword arguments, ``Place`` where a row's tensor belongs.
        shape: of a row of the first tensor, which a trained scale multiplies if ``body`` has no
            parameters; ``None``: it is no float.
        dim: of the result, where its rows are.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        tree: tuple[list[Any], dict[str, Any]],
        shape: tuple[int, ...] | None,
        dim: int,
    ) -> None:
        super().__init__()
        self.body, self.tree, self.dim = body, tree, dim
        own = isinstance(body, nn.Module) and any(True for _ in body.parameters())
        self.scale = None if own or shape is None else nn.Parameter(torch.ones(shape))

    def forward(self, **rows: Tensor) -> Tensor:
        """The result, its rows first, each of one number at least."""

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, Place):
                return leaf
            value = rows[leaf.name]
            if self.scale is not None and leaf.name == "x0":
                value = value * self.scale
            return value.movedim(0, leaf.dim)

        args, kwargs = _pytree.tree_map(fill, self.tree)
        result = first(self.body(*args, **kwargs))
        return result[:, None] if result.dim() == 1 else result.movedim(self.dim, 0)


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a tensor whose rows are along ``dim``."""

    name: str
    dim: int


def case_of(name: str, make: Callable[[], Any], args: Any, kwargs: Any, dim: int) -> Case:
    """A call with rows along a dimension of its first tensor.

    Raises:
        NoRows: if that tensor has no rows there.
    """
    leaves, spec = _pytree.tree_flatten((list(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_sparse]
    if not tensors or tensors[0].dim() <= dim or not tensors[0].numel():
        raise NoRows("its first tensor has no rows")
    length = tensors[0].shape[dim]
    rows: dict[str, Tensor] = {}

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dims = [d for d in (dim, 0, 1) if leaf.dim() > d and leaf.shape[d] == length]
        if not dims or leaf.layout != torch.strided:
            return leaf.detach()
        name = f"x{len(rows)}"
        rows[name] = _as_many(leaf.detach().movedim(dims[0], 0))
        return Place(name, dims[0])

    tree = _pytree.tree_unflatten([placed(leaf) for leaf in leaves], spec)
    head = rows["x0"]
    shape = tuple(head.shape[1:]) if head.is_floating_point() else None
    return Case(
        name=name,
        group="layers",
        build=lambda: _initialized(Called(make(), tree, shape, dim), rows),
        inputs=lambda: dict(rows),
        read=lambda output: output,
    )


def _initialized(model: Called, rows: dict[str, Tensor]) -> Called:
    """With the shapes of lazy parameters, which the first call decides."""
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        model.to(DTYPE)(**rows)
    return model


def _as_many(rows: Tensor) -> Tensor:
    """ROWS rows of those at hand, no two alike if they are floats."""
    taken = rows.index_select(0, torch.arange(ROWS) % len(rows)).contiguous()
    if not taken.is_floating_point():
        return taken
    factors = torch.tensor([1.0, 0.95, 0.9], dtype=taken.dtype)
    return taken * factors.view(-1, *[1] * (taken.dim() - 1))


def outcome(database: str, case: Case) -> Found:
    """Run a case by the engine and example by example."""
    say = functools.partial(Found, database, case.name)
    try:
        meet = rows_meet(case)
    except NoRows as error:
        return say("left out", str(error))
    try:
        refusal = refused(case) if meet else examine(case, DTYPE).refusal
    except NoRows as error:
        return say("left out", str(error), meet)
    except AssertionError as error:
        return say("wrong", _short(error), meet)
    except Exception as error:
        return say("crashed", f"{type(error).__name__}: {_short(error)}", meet)
    return say("right", "", meet) if refusal is None else say("refused", _short(refusal), meet)


def refused(case: Case) -> str | None:
    """The refusal of a model whose rows meet; ``None`` where its gradients do not.

    Raises:
        AssertionError: if the engine trains it on other gradients than an example's alone.
        NoRows: if it trains it, on gradients that are zero.
    """
    model = built(case).to(DTYPE)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        private = private_run(case, model, (*case.inputs().values(), TARGETS), lr=1.0)
        *rows, targets = next(iter(private.loader))
        output = private.module(**dict(zip(case.inputs(), rows, strict=True)))
        row_losses(output, targets).sum().backward()
        private.optimizer.step()
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        if not refuses(str(error), model):
            raise
        return str(error)
    if all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)):
        raise NoRows("its gradients are zero or not finite")
    try:
        return examine(case, DTYPE).refusal
    except AssertionError as error:
        if WITHOUT in str(error):
            raise NoRows("some of its rows have no gradient") from error
        raise


def rows_meet(case: Case) -> bool:
    """True if a row's result is another when other rows, or none, are beside it.

    Raises:
        NoRows: if there are no rows, or no gradient.
    """
    inputs = case.inputs()
    model = _ByPlace(case, built(case).to(DTYPE))
    try:
        together, again = model(*inputs.values()), model(*inputs.values())
        pair = model(*(x[:2] for x in inputs.values()))
    except Exception as error:
        raise NoRows(f"cannot be called by rows: {type(error).__name__}") from error
    if not _same(together, again):
        raise NoRows("it draws random numbers")
    if not together.dim() or len(together) != ROWS or not together.is_floating_point():
        raise NoRows("its result has no rows of numbers")
    if pair.shape != (2, *together.shape[1:]):
        raise NoRows("its result has no row for each row of two")
    if not _same(together[:2], pair):
        return True
    try:
        parts = [model(*(x[i : i + 1] for x in inputs.values())) for i in range(ROWS)]
        norms = reference(model, tuple(inputs.values()), TARGETS).norms
    except Exception as error:
        raise NoRows(f"cannot be called with one row: {type(error).__name__}") from error
    if not bool(((norms > 0) & norms.isfinite()).all()):
        raise NoRows("its gradients are zero or not finite")
    if any(part.shape != together[:1].shape for part in parts):
        raise NoRows("its result has another shape where there is one row")
    return not _same(together, torch.cat(parts))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=MEET, atol=MEET, equal_nan=True)


class _ByPlace(nn.Module):
    """A model that is called with its tensors in their order."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__()
        self.names, self.model = list(case.inputs()), model

    def forward(self, *rows: Tensor) -> Tensor:
        """The output of the model."""
        output: Tensor = self.model(**dict(zip(self.names, rows, strict=True)))
        return output


def _short(error: object) -> str:
    """The first sentence, without the names and numbers of one case."""
    text = re.split(r"(?<=[.;]) ", " ".join(str(error).split()))[0]
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", re.sub(r"'[^']*'", "'...'", text))[:160]


Make = Callable[[], Case | Found]


def of_modules(samples: int | None, only: str) -> Iterator[Make]:
    """Torch's modules, in training mode, with rows in front and, where there are none, second."""
    for info in modules():
        if only.lower() not in info.name.lower():
            continue
        torch.manual_seed(20_271_148)
        given = info.module_inputs_func(
            info, device="cpu", dtype=DTYPE, requires_grad=False, training=True
        )
        for number, sample in enumerate(itertools.islice(given, samples)):
            name = f"{info.name.removeprefix('nn.')}, sample {number}"
            name += f" ({sample.desc})" if sample.desc else ""
            made, call = sample.constructor_input, sample.forward_input
            make = functools.partial(info.module_cls, *made.args, **made.kwargs)
            args, kwargs = ((), {}) if call is None else (call.args, call.kwargs)
            yield functools.partial(_first_that_runs, "modules", name, make, args, kwargs)


def of_operators(samples: int | None, only: str) -> Iterator[Make]:
    """Torch's differentiable operators."""
    for op in operators():
        if DTYPE not in op.supported_dtypes("cpu") or not op.supports_autograd:
            continue
        if only.lower() not in op.full_name.lower():
            continue
        torch.manual_seed(20_271_148)
        for number, sample in enumerate(itertools.islice(op.sample_inputs("cpu", DTYPE), samples)):
            name = f"{op.full_name}, sample {number}"
            if op.full_name in CRASHING:
                left_out = Found("operators", name, "left out", "it can end the process")
                yield functools.partial(_itself, left_out)
                continue
            make = functools.partial(_itself, op.op)
            args = (sample.input, *sample.args)
            yield functools.partial(_first_that_runs, "operators", name, make, args, sample.kwargs)


def _itself(value: Any) -> Any:
    return value


def _first_that_runs(
    database: str, name: str, make: Callable[[], Any], args: Any, kwargs: dict[str, Any]
) -> Case | Found:
    """The call with rows along the first or second dimension: one where they do not meet."""
    meeting, reason = None, ""
    for dim in (0, 1):
        try:
            case = case_of(name, make, args, kwargs, dim)
            if not rows_meet(case):
                return case
            meeting = meeting or case
        except NoRows as error:
            reason = reason or str(error)
        except Exception as error:
            reason = reason or f"cannot be built: {type(error).__name__}"
    return meeting or Found(database, name, "left out", reason)


def _attention(rng: np.random.Generator) -> Made:
    heads = int(rng.integers(1, 3))
    return (
        _Attended(DPMultiheadAttention(2 * heads, heads)),
        (int(rng.integers(1, 5)), 2 * heads),
        0,
    )


class _Attended(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Attention of a sequence to itself, which the layer has positions first."""
        rows: Tensor = self.layer(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1)
        return rows


def _with_bias(rng: np.random.Generator) -> Made:
    width = int(rng.integers(1, 6))
    return SequenceBias(width, batch_first=True), (int(rng.integers(1, 5)), width), 0


def of_layers(samples: int | None, only: str) -> Iterator[Make]:
    """Random layers of the kinds that Opacus has tests of, 30 of each."""
    for maker in (*LAYERS, _attention, _with_bias):
        if only.lower() not in maker.__name__:
            continue
        for number in range(30 if samples is None else samples):
            rng = np.random.default_rng([20_271_148, number])
            torch.manual_seed(number)
            layer, shape, ids = maker(rng)
            generator = torch.Generator().manual_seed(number)
            if ids:
                x = torch.randint(ids, (ROWS, *shape), generator=generator)
            else:
                x = torch.randn(ROWS, *shape, generator=generator, dtype=DTYPE)
            name = f"{maker.__name__.strip('_')}, {number}: {' '.join(str(layer).split())}"
            make = functools.partial(_itself, layer)
            yield functools.partial(case_of, name, make, (x,), {}, 0)


DATABASES: dict[str, Callable[[int | None, str], Iterator[Make]]] = {
    "modules": of_modules,
    "operators": of_operators,
    "layers": of_layers,
}


def examined(database: str, samples: int | None = None, only: str = "") -> Iterator[Found]:
    """The outcomes of a database's cases: so many of each kind with ``only`` in its name."""
    for make in DATABASES[database](samples, only):
        made = make()
        yield made if isinstance(made, Found) else outcome(database, made)


def summary(found: Iterable[Found]) -> list[str]:
    """Counts of a database's outcomes, and the reasons of all that are not right."""
    found = list(found)
    by = collections.Counter((each.outcome, each.meet) for each in found)
    reasons = collections.Counter(
        (each.outcome, each.reason) for each in found if each.outcome != "right"
    )
    said = [
        f"  {number} {kind}{', rows meet' if meet else ''}"
        for (kind, meet), number in sorted(by.items())
    ]
    return said + [f"    {kind}, {n}: {why}" for (kind, why), n in reasons.most_common()]


OUTCOMES = ("right", "refused", "wrong", "crashed", "left out")
TITLES = {
    "modules": "torch's modules",
    "operators": "torch's operators",
    "layers": "Opacus's kinds of layers",
}
COLUMNS = (
    ("database", "{database}"),
    ("right", "{right}"),
    ("refused", "{refused}"),
    ("of which rows meet", "{meet}"),
    *((outcome, f"{{{outcome}}}") for outcome in OUTCOMES[2:]),
)


def counts(found: list[Found]) -> list[dict[str, Any]]:
    """By database, the number of each outcome, and of refusals those of rows that meet."""
    return [
        {
            "database": TITLES[database],
            **{kind: sum(each.outcome == kind for each in cases) for kind in OUTCOMES},
            "meet": sum(each.outcome == "refused" and each.meet for each in cases),
        }
        for database in dict.fromkeys(each.database for each in found)
        if (cases := [each for each in found if each.database == database])
    ]


def main() -> int:
    """Print the counts of every database; how many cases were wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=[*DATABASES])
    parser.add_argument("--samples", type=int, help="of each module, operator and layer at most")
    parser.add_argument(
        "--only", default="", help="modules, operators and layers with this in their name"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, help="write counts here, and all cases that are not right"
    )
    options = parser.parse_args()
    everything: list[Found] = []
    for database in options.databases:
        found = list(tqdm(examined(database, options.samples, options.only), unit="case"))
        everything += found
        print(f"{database}: {len(found)} cases", *summary(found), sep="\n")
    if options.json is not None:
        told = [each for each in everything if each.outcome not in ("right", "left out")]
        results.publish(
            options.json,
            {"layer_databases": results.Table(COLUMNS, counts(everything))},
            script=__file__,
            machine={"torch": torch.__version__, "opacus": opacus.__version__},
            quiet=True,
            cases=[dataclasses.asdict(each) for each in told],
        )
    return sum(each.outcome in ("wrong", "crashed") for each in everything)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    raise SystemExit(min(main(), 1))
