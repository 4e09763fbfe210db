"""Fine-tune a small BERT on arXiv abstracts, private for every author, from one YAML file.

``python -m recipes.arxiv --config configs/arxiv_minsep.yaml data.path=FILE data.tokenizer=DIR
model.source=DIR [field=value ...] [--resume] [--output DIR] [--simulate FACTOR]``

A paper belongs to all of its authors, an author to several papers. What is protected is everything
that an author contributed; who wrote what with whom is public (Dong & Ganesh 2026, sections 6 and
7.3).
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from recipes.command import run_recipe
from recipes.config import Count, one_of
from recipes.data.arxiv import ArxivData, arxiv
from recipes.data.arxiv_tokens import load_tokenizer
from recipes.models.bert import CATEGORY, HEADS, MASKED_TOKENS, BertSizes, bert, export
from recipes.models.bert_heads import (
    MaskTokens,
    class_batch,
    class_metrics,
    forward,
    masked_token_metrics,
    target,
)
from recipes.run import seeded
from recipes.runfolder import MODEL
from recipes.settings import FREE_ON_RESUME, PATHS, RunSettings
from recipes.task import AT_RANDOM, Export, Task


@dataclasses.dataclass
class DataSettings:
    """The papers, and which of them are used.

    Attributes:
        path: the snapshot, arxiv-metadata-oai-snapshot.json (one JSON object a line), or a folder
            with the tables (.tsv, .tsv.xz, .tsv.zip) of the archive staeiou/arxiv_archive.
        cache_dir: folder in which what was read and tokenized is kept.
        tokenizer: a folder, or a name on the hub. It must not have been trained on these papers.
        max_length: tokens of an abstract; what is longer is cut.
        max_masked: the most masked tokens of an abstract; only they are scored, which costs a
            fraction of scoring every position. null: any number, and every position is scored.
        test_size: papers held out.
        max_examples: k, the most training examples of an author, copies counted.
        duplicates: use a paper several times while all of its authors have room.
        max_neighbors: most training examples that share an author with one of them, itself
            included; fewer papers, larger batches under exclusion. null: any number.
        seed: of the shuffle and the bounding; public.
        on_error: stop at the first bad line, or skip such lines and report them.
        offline: never ask the hub.
    """

    path: str | None = None
    cache_dir: str = "cache/arxiv"
    tokenizer: str | None = None
    max_length: Annotated[int, Field(ge=3)] = 128
    max_masked: Count | None = None
    test_size: Count = 200_000
    max_examples: Count = 2
    duplicates: bool = True
    max_neighbors: Count | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    on_error: Annotated[str, one_of(("stop", "skip"))] = "stop"
    offline: bool = False


@dataclasses.dataclass
class ModelSettings:
    """A BERT: one that exists, or a new one of stated sizes.

    Attributes:
        source: a folder or a name on the hub; null is a new model of the sizes below.
        head: what is learned: masked-tokens (cross entropy of an abstract's masked tokens) or
            category (cross entropy of its archive).
        pretrained: whether the source's weights are taken; false takes its sizes only.
        tied: whether the head of masked-tokens shares the embedding's weight.
        dropout: probability; null is the source's.
        hidden_size: width of a new model.
        layers: of a new model.
        heads: of attention in a new model.
        intermediate_size: width inside the feed-forward parts of a new model.
        seed: of weights that begin at random; public.
    """

    source: str | None = None
    head: Annotated[str, one_of(HEADS)] = MASKED_TOKENS
    pretrained: bool = True
    tied: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    hidden_size: Count = 128
    layers: Count = 2
    heads: Count = 2
    intermediate_size: Count = 512
    seed: Annotated[int, Field(ge=0)] = 0


@dataclasses.dataclass
class ArxivSettings(RunSettings):
    """A whole run on arXiv abstracts, private for every author.

    Attributes:
        recipe: this one, for ``dptrain train``.
        data: the papers.
        model: the transformer.
    """

    # Where things lie; what they are is recognized by the fingerprints of graph and tokens.
    free_on_resume: ClassVar[tuple[str, ...]] = (
        *FREE_ON_RESUME,
        "data.path",
        "data.cache_dir",
        "data.tokenizer",
        "data.offline",
    )
    paths: ClassVar[tuple[str, ...]] = (*PATHS, "data.path", "data.cache_dir")
    paths_or_names: ClassVar[tuple[str, ...]] = ("data.tokenizer", "model.source")
    knows_users: ClassVar[bool] = True

    recipe: Annotated[str, one_of(("arxiv",))] = "arxiv"
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    output: str = "runs/arxiv"

    def validate(self) -> None:
        """Check what the types do not say.

        Raises:
            ValueError: naming the field, the value and the remedy.
        """
        for name, what in (
            ("path", "the snapshot, arxiv-metadata-oai-snapshot.json, or a folder of tables"),
            ("tokenizer", "a folder with a tokenizer, or its name on the hub"),
        ):
            if getattr(self.data, name) is None:
                raise ValueError(f"data.{name}=null: name {what}")
        super().validate()


def build_task(settings: ArxivSettings) -> Task:
    """Data and model of the recipe."""
    data, model = settings.data, settings.model
    assert data.path is not None
    assert data.tokenizer is not None
    found = arxiv(
        data.path,
        tokenizer=data.tokenizer,
        cache_dir=pathlib.Path(data.cache_dir),
        test_size=data.test_size,
        max_examples=data.max_examples,
        duplicates=data.duplicates,
        max_neighbors=data.max_neighbors,
        seed=data.seed,
        max_length=data.max_length,
        on_error=data.on_error,
        offline=data.offline,
    )
    classify = model.head == CATEGORY
    sizes = BertSizes(
        hidden_size=model.hidden_size,
        layers=model.layers,
        heads=model.heads,
        intermediate_size=model.intermediate_size,
    )
    module = seeded(
        model.seed,
        lambda: bert(
            sizes if model.source is None else model.source,
            head=model.head,
            vocabulary=found.vocabulary.size,
            max_length=data.max_length,
            classes=len(found.classes) if classify else None,
            pretrained=model.pretrained,
            tied=model.tied,
            dropout=model.dropout,
            offline=data.offline,
        ),
    )
    return Task(
        train=found.train,
        test=found.test,
        model=module,
        forward=forward,
        metrics=class_metrics if classify else masked_token_metrics,
        collate_fn=class_batch if classify else _masking(found, data.max_masked),
        graph=found.graph,
        bounded=found.bounded,
        target=target,
        export=Export(
            name=MODEL,
            write=lambda trained, folder, _: _export(settings, trained, folder, found.classes),
            how="with its tokenizer, for transformers' from_pretrained",
        ),
        examples="papers",
        notes=(
            f"the loss is the cross entropy of {'the archive' if classify else 'masked tokens'}",
            *found.notes,
        ),
        data="arXiv: papers with authors, abstracts and categories",
        public_data="whatever text the tokenizer was made from",
        public_weights=_public_weights(settings),
    )


def _public_weights(settings: ArxivSettings) -> str:
    source = settings.model.source
    if source is None or not settings.model.pretrained:
        return AT_RANDOM
    return "those of a folder" if "model.source" in settings.local_names() else source


def _export(
    settings: ArxivSettings, trained: Any, folder: pathlib.Path, classes: Sequence[str]
) -> None:
    """Model and tokenizer in one folder, as on the hub."""
    export(trained, folder, labels=classes if settings.model.head == CATEGORY else None)
    assert settings.data.tokenizer is not None
    load_tokenizer(settings.data.tokenizer, offline=settings.data.offline).save_pretrained(folder)


def _masking(found: ArxivData, most: int | None) -> MaskTokens:
    vocabulary = found.vocabulary
    if vocabulary.mask_id is None:
        raise ValueError(
            "model.head='masked-tokens': the tokenizer has no mask token; use that of a BERT "
            "model, or model.head=category"
        )
    return MaskTokens(
        mask_id=vocabulary.mask_id,
        vocabulary=vocabulary.size,
        special_ids=vocabulary.special_ids,
        most=most,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    return run_recipe(
        "arxiv",
        "Fine-tune a small BERT on arXiv abstracts, private for every author.",
        ArxivSettings,
        build_task,
        "python -m recipes.arxiv --config configs/arxiv_minsep.yaml \\\n"
        "    data.path=arxiv-metadata-oai-snapshot.json data.tokenizer=bert-tiny \\\n"
        "    model.source=bert-tiny privacy.epsilon=8",
        argv,
    )


if __name__ == "__main__":
    sys.exit(main())
