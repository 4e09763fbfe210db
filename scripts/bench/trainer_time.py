"""A step of Hugging Face's Trainer with privacy, as a multiple of one without.

BERT with random weights, two sizes, texts of 64 tokens in two classes, AdamW; both sides see the
same 32 rows in every step, in batches of 32 or as four microbatches of 8. They take turns within
one process, a whole ``trainer.train()`` at a time; CPU seconds from the end of one step to the end
of the next, as others use the machine as well.

    OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/bench/trainer_time.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import tempfile
import time
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from tqdm import tqdm

from dptrain.integrations.transformers import PrivacyArguments, PrivateTrainer
from scripts import results

OUT = pathlib.Path(__file__).parent / "results" / "trainer_time.json"
COLUMNS = (
    ("model", "{model}"),
    ("microbatches", "{microbatches}"),
    ("Trainer", "{seconds.ordinary:time}"),
    ("PrivateTrainer", "{seconds.private:time}"),
    ("ratio", results.SPREAD),
)
ROWS, LENGTH, VOCABULARY = 32, 64, 30522
WARM_UP = 17  # in its first 16 steps the engine also looks at what the loss divides by
SIZES = {"BERT-tiny": (2, 128), "BERT-mini": (4, 256)}  # layers and width
CASES = (("BERT-tiny", 1), ("BERT-mini", 1), ("BERT-mini", 4))  # and microbatches


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Random words with a random class, full to the end."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.words = torch.randint(5, VOCABULARY, (ROWS, LENGTH), generator=draw)
        self.labels = torch.randint(0, 2, (ROWS,), generator=draw)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        words = self.words[row]
        mask = torch.ones_like(words)
        return {"input_ids": words, "attention_mask": mask, "labels": self.labels[row]}


class Clock(transformers.TrainerCallback):
    """CPU seconds of each step, in which everything is counted that comes with it."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time."""
        self.ends.append(time.process_time())

    def per_step(self) -> float:
        """The median after the first steps."""
        late = self.ends[WARM_UP - 1 :]
        return statistics.median(after - before for before, after in itertools.pairwise(late))


def network(size: str) -> torch.nn.Module:
    """A classifier of that size with random weights."""
    layers, width = SIZES[size]
    transformers.set_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
            num_labels=2,
        )
    )


def seconds_of_step(size: str, microbatches: int, steps: int, *, private: bool) -> float:
    """CPU seconds of a step of one training."""
    clock = Clock()
    kind: Any = PrivateTrainer if private else transformers.Trainer
    privacy = {"privacy": PrivacyArguments(epsilon=8.0, delta=1e-4)} if private else {}
    with tempfile.TemporaryDirectory() as folder:
        kind(
            model=network(size),
            args=transformers.TrainingArguments(
                output_dir=folder,
                max_steps=WARM_UP + steps,
                per_device_train_batch_size=ROWS // microbatches,
                gradient_accumulation_steps=microbatches,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                logging_strategy="no",
            ),
            train_dataset=Texts(),
            callbacks=[clock],
            **privacy,
        ).train()
    return clock.per_step()


def measure(size: str, microbatches: int, rounds: int, steps: int) -> dict[str, Any]:
    """Medians of both sides over the rounds, and of the ratio within a round."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for number in tqdm(range(rounds), desc=f"{size}, {microbatches} microbatches", unit="round"):
        for private in (True, False) if number % 2 else (False, True):
            found[private].append(seconds_of_step(size, microbatches, steps, private=private))
    ratios = [a / b for a, b in zip(found[True], found[False], strict=True)]
    low, middle, high = statistics.quantiles(ratios, method="inclusive")
    return {
        "model": size,
        "microbatches": microbatches,
        "seconds": {
            "private": statistics.median(found[True]),
            "ordinary": statistics.median(found[False]),
        },
        "ratio": {"q1": low, "median": middle, "q3": high},
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    options = parser.parse_args()
    rows = [measure(*case, options.rounds, options.steps) for case in CASES]
    results.publish(
        options.json,
        {"trainer_time": results.Table(COLUMNS, rows)},
        script=__file__,
        machine=results.machine("torch", "transformers") | {"threads": torch.get_num_threads()},
        sizes={"rows": ROWS, "length": LENGTH},
    )


if __name__ == "__main__":
    main()
