"""A private step of masked tokens: scores at every position, against scores where one is masked.

BERT-tiny with random weights, 32 abstracts of 64 tokens, 15 % of them masked, at most 20 of a row;
bookkeeping clipping, independent noise. Both sides see the same rows and take turns within one
process; CPU seconds, as others use the machine as well.

    OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/bench/masked_head.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from dptrain import (
    Gradients,
    Identity,
    Loading,
    MatrixMechanism,
    Poisson,
    PrivacyEngine,
    PrivateTraining,
)
from recipes.models.bert import MASKED_TOKENS, BertSizes, bert
from recipes.models.bert_heads import MaskedTokenLoss, MaskTokens, forward, target
from scripts import results

OUT = pathlib.Path(__file__).parent / "results" / "masked_head.json"
COLUMNS = (
    ("vocabulary", "{vocabulary:,}"),
    ("every position", "{seconds.every:time}"),
    ("masked ones", "{seconds.masked:time}"),
    ("ratio", results.SPREAD),
)
ROWS, LENGTH, MOST = 32, 64, 20
WARM_UP = 17  # in its first 16 steps the engine also looks at what the loss divides by
VOCABULARIES = (4096, 30522)
SPECIAL = (0, 1, 2, 3, 4)


def samples(vocabulary: int) -> list[dict[str, np.ndarray]]:
    """Rows of random words, full to the end."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(ROWS):
        ids = rng.integers(len(SPECIAL), vocabulary, LENGTH)
        ids[0], ids[-1] = 2, 3
        row = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        rows.append(row | {"token_type_ids": np.zeros_like(ids), "position_ids": np.arange(LENGTH)})
    return rows


def private(vocabulary: int, most: int | None, steps: int) -> PrivateTraining:
    """A run in which every step takes all rows."""
    torch.manual_seed(0)
    model = bert(BertSizes(), head=MASKED_TOKENS, vocabulary=vocabulary, max_length=LENGTH)
    mask = MaskTokens(mask_id=4, vocabulary=vocabulary, special_ids=SPECIAL, most=most)
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        data=DataLoader(samples(vocabulary), collate_fn=mask),  # type: ignore[arg-type]
        mechanism=MatrixMechanism(
            scheme=Poisson(probability=1.0, dataset_size=ROWS, steps=steps),
            strategy=Identity(),
            noise_multiplier=1.0,
        ),
        max_grad_norm=1.0,
        gradients=Gradients(mode="bookkeeping"),
        loading=Loading(max_physical_batch_size=ROWS),
        seed=0,
    )


def seconds_of_steps(run: PrivateTraining) -> Iterator[float]:
    """CPU seconds of one step after the other: forward, backward, clipping, noise, update."""
    criterion = MaskedTokenLoss()
    with run:
        for batch in run.loader:
            start = time.process_time()
            run.optimizer.zero_grad()
            criterion(forward(run.module, batch), target(batch)).backward()
            run.optimizer.step()
            yield time.process_time() - start


def measure(vocabulary: int, rounds: int) -> dict[str, Any]:
    """Medians of both sides, and of the ratio within a round."""
    sides = {
        name: seconds_of_steps(private(vocabulary, most, rounds + WARM_UP))
        for name, most in (("every", None), ("masked", MOST))
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + WARM_UP):
        for name in sides if number % 2 else reversed(sides):
            found[name].append(next(sides[name]))
    every, masked = (found[name][WARM_UP:] for name in ("every", "masked"))
    ratios = [a / b for a, b in zip(every, masked, strict=True)]
    low, middle, high = statistics.quantiles(ratios, method="inclusive")
    return {
        "vocabulary": vocabulary,
        "seconds": {"every": statistics.median(every), "masked": statistics.median(masked)},
        "ratio": {"q1": low, "median": middle, "q3": high},
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    options = parser.parse_args()
    rows = [measure(vocabulary, options.rounds) for vocabulary in VOCABULARIES]
    results.publish(
        options.json,
        {"masked_head": results.Table(COLUMNS, rows)},
        script=__file__,
        machine=results.machine("torch") | {"threads": torch.get_num_threads()},
        sizes={"rows": ROWS, "length": LENGTH, "most": MOST},
    )


if __name__ == "__main__":
    main()
