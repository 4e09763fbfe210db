"""Train a multi-label classifier with full-batch private gradient descent, from one YAML file.

``python -m recipes.individual --config configs/digits_individual.yaml [field=value ...]
[--resume] [--output DIR]``

The task is that of Koskela, Tobaben & Honkela 2023 (arXiv 2209.15596), section 6: a multi-layer
perceptron predicts which of several conditions a row has. An individual filter (the group
``individual``) gives every row a privacy budget of its own; groups of rows show how the parts of
the data fare.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dptrain.configuration import SIZES
from recipes.command import run_recipe
from recipes.config import one_of
from recipes.data.digit_conditions import DIGIT_GROUPS, digit_conditions
from recipes.data.mnist_table import MNIST_GROUPS, mnist_table
from recipes.data.multilabel import ConditionGroups, MultiLabel
from recipes.data.phenotypes import PHENOTYPES
from recipes.data.phenotyping import PAPER_GROUPS, phenotyping
from recipes.macro_auc import macro_auc, single_class
from recipes.models.mlp import ACTIVATIONS, mlp
from recipes.run import check_plan, seeded
from recipes.settings import FREE_ON_RESUME, PATHS, OptimizerSettings, RunSettings
from recipes.task import Task, evenly_spread

DATA_SETS = {"digits": DIGIT_GROUPS, "mnist": MNIST_GROUPS, "phenotyping": PAPER_GROUPS}


@dataclasses.dataclass
class DataSettings:
    """Settings of the table: its kind, its place and its columns.

    Attributes:
        name: digits (conditions of scikit-learn's handwritten digits), mnist (its ten classes), or
            phenotyping (a table of yours, such as MIMIC-III's acute conditions).
        root: folder of mnist, in any layout that recipes.vision reads; or of phenotyping's CSV or
            Parquet files: train, test, and val if there is one.
        labels: of phenotyping, names of the label columns; null is the benchmark's 25.
        id_column: of phenotyping, the column that names the rows and is no feature; null is none.
        scaling: of phenotyping, a JSON file in ``root`` with public bounds of the features, which
            become -1 and 1; null takes the features as they are.
        clip: of phenotyping, scaled values beyond ±clip become ±clip; null leaves them.
        missing: of phenotyping, what stands for missing values after scaling.
        indicators: of phenotyping, add a feature to each: 1 where it is missing, else 0.
        train_on_val: of phenotyping, train on the validation rows as well.
        test_fraction: of digits, the share that is held out, in (0, 1).
        split_seed: of digits, which images are held out; public.
    """

    name: Annotated[str, one_of(DATA_SETS)] = "digits"
    root: str | None = None
    labels: list[str] | None = None
    id_column: str | None = "stay"
    scaling: str | None = None
    clip: float | None = None
    missing: float = 0.0
    indicators: bool = False
    train_on_val: bool = False
    test_fraction: float = 0.2
    split_seed: int = 0


@dataclasses.dataclass
class GroupSettings:
    """Of which rows to report, by two of their labels; a null is the data set's own.

    Attributes:
        conditions: names of two labels; rows are told apart by which of them they have. An empty
            list makes no groups.
        size: the most training rows of a group.
        test_size: the most test rows of a group.
        seed: of the draw of rows; public.
    """

    conditions: list[str] | None = None
    size: int | None = None
    test_size: int | None = None
    seed: int = 0

    def build(self, data_set: str) -> ConditionGroups:
        """The groups of a data set."""
        stated = {name: value for name, value in vars(self).items() if value is not None}
        return dataclasses.replace(DATA_SETS[data_set], **stated)


@dataclasses.dataclass
class ModelSettings:
    """A multi-layer perceptron.

    Attributes:
        widths: of the hidden layers; null is one of (features + labels)/2, and an empty list is a
            linear model.
        activation: relu or tanh.
        groups: of a GroupNorm before each activation; 1 is layer normalization, 0 none.
        seed: of the initial weights; public.
    """

    widths: list[int] | None = None
    activation: Annotated[str, one_of(ACTIVATIONS)] = "relu"
    groups: int = 0
    seed: int = 0


@dataclasses.dataclass
class IndividualSettings(RunSettings):
    """A whole run: full batches (``epoch_length: 1``) of independent noise, Adam.

    Attributes:
        recipe: this one, for ``dptrain train``.
        data: the table.
        groups: rows to report on.
        model: the network.
    """

    # Where the table lies; what it is is recognized by its fingerprint.
    free_on_resume: ClassVar[tuple[str, ...]] = (*FREE_ON_RESUME, "data.root")
    paths: ClassVar[tuple[str, ...]] = (*PATHS, "data.root")

    recipe: Annotated[str, one_of(("individual",))] = "individual"
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    groups: GroupSettings = dataclasses.field(default_factory=GroupSettings)
    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    scheme: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"type": "Poisson", "epoch_length": 1.0},
        metadata={"common": SIZES},
    )
    strategy: dict[str, Any] = dataclasses.field(default_factory=lambda: {"type": "Identity"})
    optimizer: OptimizerSettings = dataclasses.field(
        default_factory=lambda: OptimizerSettings(name="adam", lr=0.01)
    )
    output: str = "runs/individual"

    def validate(self) -> None:
        """Check what the types do not say.

        Raises:
            ValueError: naming the field, the value and the remedy.
        """
        if self.data.name != "digits" and self.data.root is None:
            raise ValueError(
                f"data.root=null: name the folder that holds the {self.data.name} files"
            )
        super().validate()


def load_table(settings: IndividualSettings) -> MultiLabel:
    """The data set that the settings name, with its groups."""
    data, groups = settings.data, settings.groups.build(settings.data.name)
    if data.name == "digits":
        return digit_conditions(
            groups=groups, test_fraction=data.test_fraction, seed=data.split_seed
        )
    assert data.root is not None
    if data.name == "mnist":
        return mnist_table(
            data.root, groups=groups, foreseen=lambda rows, _: check_plan(settings, rows)
        )
    return phenotyping(
        data.root,
        labels=PHENOTYPES if data.labels is None else data.labels,
        groups=groups,
        id_column=data.id_column,
        scaling=data.scaling,
        clip=data.clip,
        missing=data.missing,
        indicators=data.indicators,
        train_on_val=data.train_on_val,
        foreseen=lambda rows: check_plan(settings, rows),
    )


def build_task(settings: IndividualSettings) -> Task:
    """Data and model of the recipe."""
    data = load_table(settings)
    model = seeded(
        settings.model.seed,
        lambda: mlp(
            inputs=len(data.features),
            outputs=len(data.labels),
            widths=settings.model.widths,
            activation=settings.model.activation,
            groups=settings.model.groups,
        ),
    )
    task = multilabel_task(data, model, evaluate_examples=settings.evaluate_examples)
    return dataclasses.replace(task, data=settings.data.name)


def multilabel_task(
    data: MultiLabel, model: nn.Module, *, evaluate_examples: int | None = None
) -> Task:
    """Binary cross entropy, averaged over the labels of a row; accuracy; macro AUC.

    Where every row has one label, the share of rows whose likeliest label that is comes with them
    (top1_accuracy).

    Raises:
        ValueError: if the macro AUC of ``evaluate_examples`` test rows would be a mean over fewer
            labels than that of all.
    """
    labels = data.test.tensors[1]
    left_out = single_class(labels, data.labels)
    rows = evenly_spread(len(labels), evaluate_examples)
    if rows is not None:
        first = single_class(labels[rows], data.labels)
        if more := [name for name in first if name not in left_out]:
            raise ValueError(
                f"evaluate_examples={evaluate_examples}: {more[0]!r} is the same for so many test "
                f"rows ({len(more)} labels are), so their macro AUC would be that of other labels "
                "than at the end; use more, or null for all"
            )

    # Classes: of ten labels nine are absent, and guessing that of all is right nine times in ten.
    one_label = all(bool((part.tensors[1].sum(1) == 1).all()) for part in (data.train, data.test))

    def metrics(logits: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
        present = batch[1]
        losses = binary_cross_entropy_with_logits(logits, present, reduction="none")
        hits = (logits > 0).to(logits.dtype) == present
        found = {"loss": losses.mean(1), "accuracy": hits.float().mean(1)}
        if one_label:
            found["top1_accuracy"] = (logits.argmax(1) == present.argmax(1)).float()
        return found

    def summaries(logits: torch.Tensor, present: torch.Tensor) -> dict[str, float]:
        return {"macro_auc": macro_auc(logits, present, data.labels).mean}

    notes = []
    if left_out:
        notes.append(
            f"macro_auc is the mean over {len(data.labels) - len(left_out)} of {len(data.labels)} "
            "labels; every test row has, or no test row has: " + ", ".join(left_out)
        )
    return Task(
        train=data.train,
        test=data.test,
        model=model,
        forward=lambda module, batch: module(batch[0]),
        metrics=metrics,
        summaries=summaries,
        target=lambda batch: batch[1],
        examples="rows",
        train_groups=data.train_groups,
        test_groups=data.test_groups,
        notes=tuple(notes),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    return run_recipe(
        "individual",
        "Train a multi-label classifier with full-batch private gradient descent.",
        IndividualSettings,
        build_task,
        "python -m recipes.individual --config configs/digits_individual.yaml \\\n"
        "    individual.epsilon=1",
        argv,
    )


if __name__ == "__main__":
    sys.exit(main())
