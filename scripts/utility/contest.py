"""A comparison: one task, several ways to train it privately, and their settings."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn

from dptrain.sampling import Scheme
from dptrain.strategies import Strategy
from recipes.data import Split
from scripts.results import Columns

ACCURACY = "{@.mean:% .1f} ± {@.half_width:% .1f}"
LOSS = "{@.mean:.4f} ± {@.half_width:.4f}"
SEEDS = " ({@.seeds})"
NOT_RUN = "not run"
HELD_OUT = 0.1
"""Share of the training set on which learning rates are chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train.

    Attributes:
        title: for tables and plots.
        scheme: from the number of training examples, or what ``Contest.population`` returns in its
            place, to the scheme; ``None`` for stock Opacus.
        strategy: how its noise is correlated; unused for Opacus.
        rates: learning rates in place of the contest's; ``None``: the contest's.
        first_rate: that of them which is tried first; then those beside the best so far, until both
            are known, which finds the best if scores rise to it and fall. ``None``: all are tried.
        max_grad_norm: R in place of the contest's; ``None``: the contest's.
    """

    title: str
    scheme: Callable[[Any], Scheme] | None = None
    strategy: Strategy | None = None
    rates: tuple[float, ...] | None = None
    first_rate: float | None = None
    max_grad_norm: float | None = None


def by_method(titles: Mapping[str, str], *templates: str) -> Columns:
    """Columns of ε and of each method by name, with ``@`` in a template for the name."""
    columns = ((title, *(t.replace("@", n) for t in templates)) for n, title in titles.items())
    return [("ε", "{epsilon}"), *columns]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contest:
    """One task and everything that the methods have in common.

    Learning rates are chosen by runs on nine tenths of the training set, on the rest of it; then
    fresh seeds train on the whole of it, and the test set is looked at once, after the last step.
    The choice itself is not private, for none of the methods.

    A contest that is not about images brings ``run``, which trains and evaluates; what its tuning
    runs look at is then its own affair, as long as it is not the test set.

    Attributes:
        title: of the plot.
        script: ``__file__`` of the script that says so.
        load: from the folder of the data to its training and its test set; unused with ``run``.
        dataset_size: N, of the whole training set.
        network: from a seed to the untrained net.
        methods: by a short name, for each ε.
        rates: learning rates that are tried.
        tuning_seeds: of the runs that choose.
        seeds: of the runs that count.
        steps: optimizer steps.
        epoch_length: N / expected batch size; a held-out part leaves it as it is, and so the noise.
        delta: of the guarantee.
        max_grad_norm: R.
        momentum: of SGD.
        schedule: factor of the learning rate by name (``recipes.schedule``).
        physical_batch_size: most examples in a processor's memory at once; a GPU gets whole
            batches.
        run: from the contest, the folder of the data, a job, its noise, the device and a finished
            run of the same kind (tuning, or final) or ``None``, to ``accuracy``, ``loss`` and
            ``seconds``; images of ``load`` if left out.
        score: what learning rates are chosen by, and the table and the plot show: ``"accuracy"``
            (the more the better) or ``"loss"`` (the less).
        population: from the folder of the data to what schemes are made of, where that is more than
            the number of examples: a graph of users, say.
        tables: columns by the table's name (``scripts.results``). A row is an ε and has a cell for
            each method (``Results.rows``).
        row_a_method: a row is a method instead, with the fields of its cell.
    """

    title: str
    script: str
    load: Callable[[pathlib.Path], Split] | None = None
    dataset_size: int
    network: Callable[[int], nn.Module] | None = None
    methods: Callable[[float], Mapping[str, Method]]
    epsilons: tuple[float, ...]
    rates: tuple[float, ...]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    steps: int
    epoch_length: float
    delta: float
    max_grad_norm: float
    momentum: float
    schedule: str = "constant"
    physical_batch_size: int | None = None
    run: (
        Callable[[Contest, pathlib.Path, Job, Any, str, dict[str, Any] | None], dict[str, Any]]
        | None
    ) = None
    score: Literal["accuracy", "loss"] = "accuracy"
    population: Callable[[pathlib.Path], Any] | None = None
    tables: Mapping[str, Columns] = dataclasses.field(default_factory=dict)
    row_a_method: bool = False

    def rates_of(self, method: str, epsilon: float) -> tuple[float, ...]:
        """The learning rates that may be tried for a method, ascending."""
        of = self.methods(epsilon)[method]
        return tuple(sorted(self.rates if of.rates is None else of.rates))

    def rows_of(self, device: str) -> int | None:
        """Most examples at once on a device; ``None``: whole batches."""
        return self.physical_batch_size if device == "cpu" else None

    def norm_of(self, method: str, epsilon: float) -> float:
        """R of a method."""
        own = self.methods(epsilon)[method].max_grad_norm
        return self.max_grad_norm if own is None else own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One training run of a contest."""

    method: str
    epsilon: float
    rate: float
    seed: int
    tuning: bool

    @property
    def kind(self) -> str:
        """Either ``"tuning"``, for a run that chooses, or ``"final"``, for one that counts."""
        return "tuning" if self.tuning else "final"

    @property
    def key(self) -> dict[str, Any]:
        """The fields by which its line of the file is found."""
        found = dataclasses.asdict(self)
        del found["tuning"]
        return {"kind": self.kind, **found}
