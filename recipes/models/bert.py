"""BERT with a masked-language or a classification head, fit for per-example gradients."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recipes.data.arxiv_tokens import not_found
from recipes.data.packages import package, readable_import_errors

MASKED_TOKENS, CATEGORY = "masked-tokens", "category"
HEADS = {MASKED_TOKENS: "BertForMaskedLM", CATEGORY: "BertForSequenceClassification"}
# Parts that a checkpoint may lack, as it was made with another head; they begin at random.
_NEW = {MASKED_TOKENS: ("cls.",), CATEGORY: ("classifier.", "bert.pooler.")}

DECODER_BIAS, HEAD_BIAS = "cls.predictions.decoder.bias", "cls.predictions.bias"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertSizes:
    """A BERT to be made anew; the defaults are those of BERT-Tiny (4.4 million parameters)."""

    hidden_size: int = 128
    layers: int = 2
    heads: int = 2
    intermediate_size: int = 512


def bert(
    source: str | pathlib.Path | BertSizes,
    *,
    head: str,
    vocabulary: int,
    max_length: int,
    classes: int | None = None,
    pretrained: bool = True,
    tied: bool = True,
    dropout: float | None = None,
    offline: bool = False,
) -> nn.Module:
    """The model; its forward takes the columns of the token rows and gives ``.logits``.

    It is transformers' model with three changes that leave what it computes alone and make every
    parameter's per-example gradient right in Opacus's modes too:

    - the head's second name for the decoder's bias is taken away: Opacus would treat the head as
      one layer because of it;
    - the word embedding has no ``padding_idx``: autograd would leave the padding token's row out,
      Opacus's rules would not. No unmasked position looks at padding, so the row hardly moves;
    - with ``tied=False`` the masked-token head gets a copy of the embedding as its own weight.

    The masked-token model also takes ``scored_positions``, int64 of shape (rows, positions): its
    head then sees the states there only, and ``.logits`` are (rows, positions, vocabulary).

    Tied weights (BERT's own form) are right in all modes.

    Args:
        source: local folder, hub name, or the sizes of a new model.
        head: ``"masked-tokens"`` or ``"category"``.
        vocabulary: tokens of the tokenizer.
        max_length: tokens of a row.
        classes: number of classes, for ``"category"``.
        pretrained: ``False`` takes the sizes from the source's configuration and random weights,
            from torch's global generator; ``BertSizes`` always does.
        tied: whether the masked-token head shares the embedding's weight.
        dropout: in (0, 1) or 0, instead of the configuration's.
        offline: never ask the hub.

    Raises:
        ValueError: if there is no such model, it is no BERT, or does not fit the tokens.
    """
    if head not in HEADS:
        raise ValueError(f"head={head!r}: choose one of {', '.join(HEADS)}")
    if (head == CATEGORY) != (classes is not None):
        raise ValueError(f"classes={classes}: give it for head={CATEGORY!r}, and only there")
    config = _config(source, vocabulary=vocabulary, max_length=max_length, offline=offline)
    if classes is not None:
        config.num_labels = classes
    if dropout is not None:
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout}: must lie in [0, 1)")
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
        config.classifier_dropout = None  # as hidden_dropout_prob
    with readable_import_errors():
        kind = _kind(head)
        if pretrained and not isinstance(source, BertSizes):
            model = _pretrained(kind, source, config, head=head, offline=offline)
        else:
            config._attn_implementation = "eager"
            model = kind(config)
    model.bert.embeddings.word_embeddings.padding_idx = None
    if head == MASKED_TOKENS:
        predictions = model.cls.predictions
        if tied and predictions.decoder.weight is not model.get_input_embeddings().weight:
            raise ValueError(f"tied=True: the model {source} has untied weights; set tied=False")
        del predictions.bias  # the decoder has the same parameter, and uses it
        if not tied:
            weight = predictions.decoder.weight.detach().clone()
            predictions.decoder.weight = nn.Parameter(weight)
            config.tie_word_embeddings = False
    module: nn.Module = model.train()
    return module


@functools.cache
def _kind(head: str) -> Any:
    """transformers' class, or for masked tokens one that can leave positions out."""
    kind = getattr(package("transformers"), HEADS[head])
    if head == CATEGORY:
        return kind
    output = package("transformers.modeling_outputs").MaskedLMOutput

    def forward(self: Any, *, scored_positions: Any = None, **inputs: Any) -> Any:
        states = self.bert(**inputs).last_hidden_state
        if scored_positions is not None:
            places = scored_positions[..., None].expand(-1, -1, states.shape[-1])
            states = states.gather(1, places)
        return output(logits=self.cls(states))

    # Under the name that it stands for: save_pretrained writes it into the configuration.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})


def export(model: Any, folder: pathlib.Path, *, labels: Sequence[str] | None = None) -> None:
    """Save a model that ``bert`` made as transformers' own, for ``from_pretrained``.

    Args:
        model: the module, trained or not; it stays as it is.
        folder: made if missing; holds ``config.json`` and ``model.safetensors`` afterwards.
        labels: names of the classes, for the category head.
    """
    state = model.state_dict()
    if DECODER_BIAS in state:
        # The second name that bert() took away. A copy: of two names for one tensor only this one
        # would be written, and a model with untied weights does not find the other again.
        state[HEAD_BIAS] = state[DECODER_BIAS].clone()
    if labels is not None:
        model.config.id2label = dict(enumerate(labels))
        model.config.label2id = {label: number for number, label in enumerate(labels)}
    model.save_pretrained(folder, state_dict=state)


def _config(source: Any, *, vocabulary: int, max_length: int, offline: bool) -> Any:
    transformers = package("transformers")
    if isinstance(source, BertSizes):
        return _new_config(source, vocabulary=vocabulary, max_length=max_length)
    try:
        with readable_import_errors():
            config = transformers.AutoConfig.from_pretrained(str(source), local_files_only=offline)
    except (OSError, ValueError) as error:
        raise not_found("model", source, offline, error) from error
    if config.model_type != "bert":
        raise ValueError(
            f"the model {source} is a {config.model_type}, and the recipe supplies the inputs of "
            "a BERT; name a model whose config.json has model_type bert"
        )
    if config.vocab_size < vocabulary:
        raise ValueError(
            f"the model {source} knows {config.vocab_size} tokens and the tokenizer has "
            f"{vocabulary}; use the tokenizer that was made for the model"
        )
    if config.vocab_size > vocabulary:
        _log.warning(
            "the model %s knows %d tokens and the tokenizer has %d: make sure that it is the "
            "model's own",
            source,
            config.vocab_size,
            vocabulary,
        )
    if config.max_position_embeddings < max_length:
        raise ValueError(
            f"max_length={max_length}: the model {source} takes at most "
            f"{config.max_position_embeddings} tokens"
        )
    return config


def _new_config(sizes: BertSizes, *, vocabulary: int, max_length: int) -> Any:
    for name, value in dataclasses.asdict(sizes).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
    if sizes.hidden_size % sizes.heads:
        raise ValueError(f"hidden_size={sizes.hidden_size}: must be a multiple of {sizes.heads=}")
    with readable_import_errors():
        return package("transformers").BertConfig(
            vocab_size=vocabulary,
            hidden_size=sizes.hidden_size,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            intermediate_size=sizes.intermediate_size,
            max_position_embeddings=max_length,
        )


def _pretrained(kind: Any, source: Any, config: Any, *, head: str, offline: bool) -> Any:
    try:
        model, found = kind.from_pretrained(
            str(source),
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=offline,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise not_found("model", source, offline, error) from error
    missing = sorted(found["missing_keys"])
    if lost := [name for name in missing if not name.startswith(_NEW[head])]:
        raise ValueError(
            f"the weights of {source} lack {lost[:3]} ({len(lost)} in all): they are not those of "
            "its configuration; set pretrained=False for a model with random weights"
        )
    if missing:
        _log.warning("%s has no weights for %s: they begin at random", source, ", ".join(missing))
    return model
