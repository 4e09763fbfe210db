"""``python -m recipes.plan``: ``dptrain plan``, with what else a recipe's configuration states.

``dptrain plan`` writes the mechanism and its target, and knows no recipe. The optimizer whose
momentum the workload was made for, and the rows that the device holds at a time, are entries of a
recipe's configuration; they are added here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from dptrain.commands import CommandParser, plan
from dptrain.core import in_words
from dptrain.planning import Question
from dptrain.strategies import MomentumSGD

_NAME = "python -m recipes.plan"


def training_entries(question: Question) -> dict[str, Any]:
    """The settings that recipes read besides the mechanism, as far as the question fixes them."""
    workload = question.workload
    momentum = workload.momentum if isinstance(workload, MomentumSGD) else 0.0
    entries: dict[str, Any] = {
        "recipe": "vision",
        "optimizer": {"name": "sgd", "momentum": momentum},
    }
    if question.physical_batch_size is not None:
        entries["max_physical_batch_size"] = question.physical_batch_size
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Compare schemes and strategies, and write a recipe's configuration.

    Returns:
        The exit status: 2 for a mistake in the arguments.
    """
    parser = CommandParser(
        prog=_NAME,
        description=main.__doc__.split("\n")[0] if main.__doc__ else None,
        example=f"{_NAME} --epsilon 8 --dataset-size 1500 --batch-size 150 --epochs 10 "
        "--max-bands 4 --momentum 0.9 --out run.yaml",
    )
    plan.add_plan_arguments(parser)
    options = parser.parse_args(argv)
    try:
        plan.run(
            options,
            program=_NAME,
            more=training_entries,
            usage="python -m recipes.vision --config THIS data.name=cifar10 data.root=DIR",
        )
    except (ValueError, ModuleNotFoundError, OSError) as error:
        print(f"{_NAME}: {in_words(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
