"""A tokenizer and a BERT's first weights from papers outside of an arXiv run; nothing is private.

``python -m recipes.arxiv_warm_start --path FOLDER --output FOLDER [--test-size 50000] …``

The split and the bounds must be those of the private run (``data.test_size``,
``data.max_examples``, ``data.duplicates``, ``data.max_neighbors``, ``data.seed``), as they decide
which papers are outside: see ``recipes.data.arxiv_outside`` for what is assumed about them. Masked
tokens and categories are learned at once, by two heads on one encoder. The folder then holds
``tokenizer``, ``category`` and ``masked-tokens``, for ``data.tokenizer`` and ``model.source``, and
``outside.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from recipes.command import words_to_stderr
from recipes.data.arxiv import read_papers, select_papers
from recipes.data.arxiv_categories import CLASSES
from recipes.data.arxiv_outside import SPECIAL, Outside, outside_papers, train_tokenizer
from recipes.data.arxiv_tokens import tokenise, vocabulary_of
from recipes.device import unusable
from recipes.models.bert import CATEGORY, MASKED_TOKENS, BertSizes, bert, export
from recipes.models.bert_heads import (
    INPUTS,
    SCORED,
    Batch,
    ClassLoss,
    MaskedTokenLoss,
    MaskTokens,
    class_batch,
    class_metrics,
    forward,
)
from recipes.task import to_device

WATCHED = 2_000
"""Outside papers that are not trained on, to see how well the weights do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Settings by which the weights are made.

    Attributes:
        sizes: of the BERT.
        vocabulary: tokens of the tokenizer.
        max_length: tokens of an abstract.
        most_masked: see ``recipes.models.bert_heads.MaskTokens``.
        epochs: passes over the outside papers.
        batch_size: papers a step.
        lr: AdamW's, after a tenth of the steps; falls to zero in a line.
        seed: of weights, order and masks.
        device: that is trained on; cpu, cuda, cuda:1 and so on.
    """

    sizes: BertSizes
    vocabulary: int = 4096
    max_length: int = 32
    most_masked: int = 12
    epochs: int = 5
    batch_size: int = 64
    lr: float = 1e-3
    seed: int = 0
    device: str = "cpu"


def heads(settings: WarmStart, vocabulary: int) -> dict[str, Any]:
    """Two models by head, which share embeddings and encoder."""
    torch.manual_seed(settings.seed)
    made: dict[str, Any] = {
        head: bert(
            settings.sizes,
            head=head,
            vocabulary=vocabulary,
            max_length=settings.max_length,
            classes=len(CLASSES) if head == CATEGORY else None,
        )
        for head in (MASKED_TOKENS, CATEGORY)
    }
    masked, category = (made[head].bert for head in (MASKED_TOKENS, CATEGORY))
    category.embeddings, category.encoder = masked.embeddings, masked.encoder
    return {head: model.to(settings.device) for head, model in made.items()}


def both(made: dict[str, Any], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of masked tokens and of categories, by one pass of the encoder on masked rows."""
    masked, category = made[MASKED_TOKENS], made[CATEGORY]
    states = masked.bert(**{name: batch[name] for name in INPUTS}).last_hidden_state
    pooled = category.dropout(category.bert.pooler(states))
    places = batch[SCORED][..., None].expand(-1, -1, states.shape[-1])
    return masked.cls(states.gather(1, places)), category.classifier(pooled)


def learn(made: dict[str, Any], rows: Any, mask: MaskTokens, settings: WarmStart) -> None:
    """Train both heads on token rows: the mean loss of each, added."""
    parameters = {id(p): p for model in made.values() for p in model.parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=settings.lr, weight_decay=0.01)
    batches = len(rows) // settings.batch_size
    steps = settings.epochs * batches

    def factor(step: int) -> float:
        return min(10 * (step + 1) / steps, (steps - step) / steps)

    schedule = LambdaLR(optimizer, factor)
    rng, device = np.random.default_rng(settings.seed), torch.device(settings.device)
    with tqdm(total=steps, desc="warm start", unit="step", mininterval=10) as bar:
        for _ in range(settings.epochs):
            for part in rng.permutation(len(rows))[: batches * settings.batch_size].reshape(
                batches, -1
            ):
                samples = [rows[int(row)] for row in part]
                batch = to_device(mask(samples), device)
                labels = class_batch(samples)["labels"].to(device)
                optimizer.zero_grad()
                tokens, classes = both(made, batch)
                tokens = MaskedTokenLoss()(tokens, batch["labels"])
                classes = ClassLoss()(classes, labels)
                (tokens + classes).backward()
                optimizer.step()
                schedule.step()
                bar.update()
                bar.set_postfix(tokens=f"{tokens:.3f}", category=f"{classes:.3f}", refresh=False)


@torch.no_grad()
def accuracy(model: nn.Module, rows: Any) -> float:
    """Share of token rows whose category the model names."""
    was_training = model.training
    model.eval()
    hits = 0.0
    for start in range(0, len(rows), 256):
        batch = class_batch([rows[row] for row in range(start, min(start + 256, len(rows)))])
        batch = to_device(batch, next(model.parameters()).device)
        hits += float(class_metrics(forward(model, batch), batch)["accuracy"].sum())
    model.train(was_training)
    return hits / len(rows)


def warm_start(
    papers: Any, outside: Outside, *, key: str, cache_dir: str, output: pathlib.Path,
    settings: WarmStart,
) -> dict[str, Any]:  # fmt: skip
    """Write tokenizer and weights; returns what there is to say about them."""
    start = time.process_time()
    chosen = papers.select(outside.rows, keep_in_memory=True)
    tokenizer = train_tokenizer(chosen["abstract"], output / "tokenizer", size=settings.vocabulary)
    tokens = tokenise(
        chosen,
        tokenizer=tokenizer,
        cache_dir=cache_dir,
        key=f"{key}:{hashlib.sha256(outside.rows.tobytes()).hexdigest()}",
        max_length=settings.max_length,
        name="outside",
    )
    order = np.random.default_rng(settings.seed).permutation(len(tokens))
    watched = min(WATCHED, len(tokens) // 10)
    rows = [tokens[int(row)] for row in order]
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.mask_id is not None
    made = heads(settings, vocabulary.size)
    mask = MaskTokens(
        mask_id=vocabulary.mask_id,
        vocabulary=vocabulary.size,
        special_ids=vocabulary.special_ids,
        most=settings.most_masked,
    )
    learn(made, rows[watched:], mask, settings)
    for head, model in made.items():
        export(model, output / head, labels=CLASSES if head == CATEGORY else None)
    facts = {
        "papers": len(outside.rows),
        "of_one_author": outside.single,
        "not_outside_of_users": outside.of_users,
        "not_outside_of_bounded_away": outside.of_bounded_away,
        "vocabulary": vocabulary.size,
        "parameters": sum(p.numel() for p in made[CATEGORY].parameters()),
        "accuracy_on_watched": accuracy(made[CATEGORY], rows[:watched]) if watched else None,
        "cpu_seconds": time.process_time() - start,
        "settings": dataclasses.asdict(settings),
    }
    text = json.dumps(facts, indent=1, sort_keys=True)
    (output / "outside.json").write_text(text + "\n", encoding="utf-8")
    return facts


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="A tokenizer and a BERT's first weights from papers outside of an arXiv run."
    )
    parser.add_argument("--path", required=True, help="as data.path of the arXiv recipe")
    parser.add_argument(
        "--output", type=pathlib.Path, required=True, help="new folder for tokenizer and weights"
    )
    parser.add_argument("--cache-dir", default="cache/arxiv", help="where what was read is kept")
    parser.add_argument("--test-size", type=int, default=200_000, help="papers held out")
    parser.add_argument("--max-examples", type=int, default=2, help="k, most papers of a user")
    parser.add_argument("--no-duplicates", action="store_true", help="bound without copies")
    parser.add_argument("--max-neighbors", type=int, help="most papers that share a user with one")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the bounding; public")
    parser.add_argument(
        "--on-error", choices=("stop", "skip"), default="stop", help="what a bad record does"
    )
    for name, default, meaning in (
        ("vocabulary", 4096, "tokens of the tokenizer"),
        ("max-length", 32, "tokens of an abstract"),
        ("most-masked", 12, "masked tokens of an abstract, at most"),
        ("epochs", 5, "passes over the papers outside"),
        ("batch-size", 64, "papers of a step"),
        ("hidden-size", 128, "width of the model"),
        ("layers", 2, "of the model"),
        ("heads", 2, "of attention"),
        ("intermediate-size", 512, "width within a layer"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=meaning)
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON document")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--device", default="cpu", help="that is trained on, e.g. cuda")
    options = parser.parse_args(argv)
    if options.output.exists():
        parser.error(f"--output {options.output} exists already: name another folder")
    # [CLS], a token and [SEP]; the special tokens and one of text.
    least = {"max_length": 3, "vocabulary": len(SPECIAL) + 1}
    sizes = ("hidden_size", "layers", "heads", "intermediate_size")
    counts = ("vocabulary", "max_length", "most_masked", "epochs", "batch_size", *sizes)
    for name in counts:
        if getattr(options, name) < least.get(name, 1):
            parser.error(f"--{name.replace('_', '-')}: must be at least {least.get(name, 1)}")
    if not options.lr > 0:
        parser.error(f"--lr {options.lr}: must be above 0")
    if reason := unusable(options.device):
        parser.error(f"--device {options.device}: {reason}")
    if options.hidden_size % options.heads:
        parser.error(f"--hidden-size {options.hidden_size}: must be a multiple of --heads")
    try:
        with words_to_stderr(options.json):
            facts = _made(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        print(
            f"{options.output} holds a tokenizer of {facts['vocabulary']} tokens and the first "
            f"weights of a BERT, learned from {facts['papers']} papers outside of the run; "
            "outside.json has the figures"
        )
    return 0


def _made(options: argparse.Namespace) -> dict[str, Any]:
    """Read, choose, learn and write."""
    snapshot = read_papers(options.path, cache_dir=options.cache_dir, on_error=options.on_error)
    chosen = select_papers(
        snapshot,
        test_size=options.test_size,
        max_examples=options.max_examples,
        duplicates=not options.no_duplicates,
        max_neighbors=options.max_neighbors,
        seed=options.seed,
    )
    return warm_start(
        snapshot.papers,
        outside_papers(snapshot, chosen),
        key=snapshot.report.sha256,
        cache_dir=options.cache_dir,
        output=options.output,
        settings=WarmStart(
            sizes=BertSizes(
                hidden_size=options.hidden_size,
                layers=options.layers,
                heads=options.heads,
                intermediate_size=options.intermediate_size,
            ),
            vocabulary=options.vocabulary,
            max_length=options.max_length,
            most_masked=options.most_masked,
            epochs=options.epochs,
            batch_size=options.batch_size,
            lr=options.lr,
            device=options.device,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
