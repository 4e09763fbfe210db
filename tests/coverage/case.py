"""A model of the coverage matrix: how it is built, what it is fed, what of its output is trained.

Models are what the libraries' own classes build from a configuration, at random and tiny: no file
is read, no network asked.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn

Inputs = dict[str, Tensor]

ROWS, LENGTH, VOCABULARY, PAD = 3, 8, 50, 0
LENGTHS = (8, 5, 3)  # of the rows; what comes after is padding

# What configurations call the same thing; a name that one does not know does nothing there.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
NO_DROPOUT = dict.fromkeys(
    (
        *("dropout", "hidden_dropout", "hidden_dropout_prob", "dropout_rate", "dropout_prob"),
        *("attention_dropout", "attention_probs_dropout_prob", "attention_dropout_prob"),
        *("activation_dropout", "classifier_dropout", "classifier_dropout_prob", "embd_pdrop"),
        *("attn_pdrop", "resid_pdrop", "summary_first_dropout", "seq_classif_dropout"),
        *("encoder_layerdrop", "decoder_layerdrop", "layerdrop", "drop_path_rate"),
        *("feat_proj_dropout", "embedding_dropout", "mlp_dropout", "resid_dropout"),
        *("embed_dropout", "qa_dropout", "residual_dropout"),
        *("embd_dropout", "emb_dropout", "conv_dropout", "final_dropout", "drop_rate"),
    ),
    0.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: as its users call it.
        group: the table of the page that it stands in.
        build: makes it, in float32; its dropout is off.
        inputs: what it is called with, by the names of its arguments, one row an example.
        read: of what it returns, a tensor with a row for each example, which the loss is made of.
        quick: whether the test is run with those that are not slow.
        precise: whether the model itself runs in float64, and in nothing less within.
        twice: whether the loop feeds each row twice, and takes the first's loss. The backward pass
            of a batch norm in eval mode is wrong in torch 2.13 for a batch of one whose output's
            gradient lies channels last.
    """

    name: str
    group: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    read: Callable[[Any], Tensor]
    quick: bool = False
    precise: bool = True
    twice: bool = False


def first(output: Any) -> Tensor:
    """Logits where there are some, else the last hidden state, else what comes first."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    values = list(output.values() if isinstance(output, Mapping) else output)
    return first(values[0])


def tiny(config: str, **options: Any) -> Any:
    """A configuration of transformers, by its class's name without ``Config``, and tiny.

    Options that are ``...`` are left to its default.
    """
    options = {**SIZES, **NO_DROPOUT, **options}
    given = {name: value for name, value in options.items() if value is not ...}
    return getattr(transformers, f"{config}Config")(**given)


def hugging_face(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Builds a model of transformers, ``kind`` of a tiny ``config``."""
    return lambda: getattr(transformers, kind)(tiny(config, **options))


def generator() -> torch.Generator:
    """Inputs are the same wherever they are made."""
    return torch.Generator().manual_seed(4)


def mask() -> Tensor:
    """1 where a row has a token, shape (ROWS, LENGTH)."""
    return (torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]).long()


def tokens() -> Inputs:
    """Rows of different lengths and their mask; the first has a token several times."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator())
    ids[0, 1:3] = ids[0, 0]
    return {"input_ids": ids.masked_fill(mask() == 0, PAD), "attention_mask": mask()}


def unmasked() -> Inputs:
    """Of a model that takes no mask."""
    return {"input_ids": tokens()["input_ids"]}


def two_texts() -> Inputs:
    """Of a model that reads one text and goes on with another."""
    ids = torch.randint(3, VOCABULARY, (ROWS, 5), generator=generator())
    return {**tokens(), "decoder_input_ids": ids}


def images(size: int = 32, channels: int = 3) -> Callable[[], Inputs]:
    """One image a row, by the name that transformers has for it."""
    return lambda: {"pixel_values": torch.randn(ROWS, channels, size, size, generator=generator())}


def positional(size: int = 32) -> Callable[[], Inputs]:
    """One image a row, of a model whose forward calls it ``x``."""
    return lambda: {"x": images(size)()["pixel_values"]}


def waves(length: int = 400) -> Callable[[], Inputs]:
    """Sound, one row an example."""
    return lambda: {"input_values": torch.randn(ROWS, length, generator=generator())}
