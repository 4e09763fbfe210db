"""Abstracts to tokens: done once, kept in a memory-mapped file of fixed-length rows."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np

from recipes.data.cache import cache_folder
from recipes.data.packages import package, readable_import_errors

FORMAT = 1  # of the cached files; raise it with any change of what is stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The facts about a tokenizer that a model and its loss need.

    Attributes:
        size: number of tokens.
        mask_id: the token that hides another, ``None`` if there is none.
        special_ids: tokens that are no text ([CLS], [SEP], [PAD], …).
        fingerprint: SHA-256 (hex) of the tokenizer.
    """

    size: int
    mask_id: int | None
    special_ids: tuple[int, ...]
    fingerprint: str


def load_tokenizer(source: str | pathlib.Path, *, offline: bool = False) -> Any:
    """The fast tokenizer in a local folder, or of that name on the Hugging Face hub.

    Args:
        source: folder, or name such as ``"google/bert_uncased_L-2_H-128_A-2"``.
        offline: never ask the hub; a hub name then works if it was downloaded before.

    Raises:
        ValueError: if there is none, it is not a fast one, knows no word, or does not pad.
    """
    transformers = package("transformers")
    try:
        with readable_import_errors():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(source), local_files_only=offline
            )
    except (OSError, ValueError) as error:
        raise not_found("tokenizer", source, offline, error) from error
    if problem := _problem(tokenizer):
        raise ValueError(
            f"the tokenizer {source} {problem}; use that of a BERT model (a folder with "
            "tokenizer.json)"
        )
    return tokenizer


def _problem(tokenizer: Any) -> str | None:
    if not tokenizer.is_fast:
        return "is not a fast one"
    if tokenizer.pad_token_id is None:
        return "has no padding token"
    # transformers makes an empty one where a folder holds a model and no tokenizer.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        return "knows no token of text"
    return None


def not_found(what: str, source: Any, offline: bool, error: Exception) -> ValueError:
    """The error for a tokenizer or model that neither the disk nor the hub gives."""
    asked = "the local cache" if offline else "the Hugging Face hub"
    reason = (str(error).splitlines() or [""])[0]
    return ValueError(
        f"no {what} {str(source)!r}: it is no folder that holds one, and {asked} does not give it "
        f"({type(error).__name__}: {reason}). Download it where there is a network (hf download "
        "NAME --local-dir FOLDER) and give the folder's path"
    )


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """The facts of a fast tokenizer."""
    # Truncation and padding are settings of a call that the tokenizer remembers: not its identity.
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules |= {"truncation": None, "padding": None}
    special = sorted(set(tokenizer.all_special_ids))
    text = json.dumps([rules, special, tokenizer.pad_token_id], sort_keys=True)
    return Vocabulary(
        size=len(tokenizer),
        mask_id=tokenizer.mask_token_id,
        special_ids=tuple(special),
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
    )


def tokenise(
    papers: Any,
    *,
    tokenizer: Any,
    cache_dir: str | pathlib.Path,
    key: str,
    max_length: int = 128,
    name: str = "tokens",
) -> Any:
    """Token rows of the papers' abstracts, as a memory-mapped ``datasets.Dataset``.

    Columns, in numpy: ``input_ids``, ``attention_mask`` (0 for padding), ``token_type_ids`` (all 0)
    and ``position_ids`` (0, 1, …), each of ``max_length``, and ``label``. The attribute
    ``fingerprint`` names the content, as a resumed run compares it. A row holds its own position
    and type ids because per-example gradients need one row an example in every layer's input, where
    BERT would make one row for all.

    Args:
        papers: dataset with the columns ``abstract`` and ``label``.
        tokenizer: a fast one.
        cache_dir: where the file is kept.
        key: text that names the papers and their order exactly; rows kept from an earlier call
            with the same key, tokenizer and length are used again.
        max_length: tokens of a row; longer abstracts are cut, shorter ones padded.
        name: what the progress bar and the file call it.

    Raises:
        ValueError: if ``max_length`` does not leave room for a token of text.
    """
    datasets = package("datasets")
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 3:
        raise ValueError(f"max_length={max_length!r}: at least 3, for [CLS], a token and [SEP]")
    facts = f"{FORMAT}:{key}:{vocabulary_of(tokenizer).fingerprint}:{max_length}:{len(papers)}"
    digest = hashlib.sha256(facts.encode()).hexdigest()
    cache = cache_folder(cache_dir)
    row = {"input_ids": "int32", "attention_mask": "int8", "token_type_ids": "int8"}
    features = {
        column: datasets.List(datasets.Value(dtype), length=max_length)
        for column, dtype in {**row, "position_ids": "int16"}.items()
    }
    positions = np.arange(max_length, dtype=np.int16)

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        encoded = tokenizer(
            batch["abstract"],
            padding="max_length",
            truncation=True,
            max_length=max_length,
            return_attention_mask=True,
            return_token_type_ids=True,
        )
        columns = {column: np.array(encoded[column], dtype) for column, dtype in row.items()}
        count = len(batch["abstract"])
        return {**columns, "position_ids": np.tile(positions, (count, 1)), "label": batch["label"]}

    # Loader workers fork later, and without a word here the tokenizer warns in each of them that
    # its threads are gone; they tokenise nothing.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokens = papers.map(
        encode,
        batched=True,
        remove_columns=papers.column_names,
        features=datasets.Features({**features, "label": datasets.Value("int16")}),
        cache_file_name=str(cache / f"{name}-{digest[:32]}.arrow"),
        load_from_cache_file=True,
        new_fingerprint=digest[:32],
        desc=f"tokenise {name}",
    )
    tokens = tokens.with_format("numpy")
    # By what the rows are made of: a resumed run must see the same ones, wherever they lie.
    tokens.fingerprint = digest
    return tokens
