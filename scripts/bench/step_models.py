"""The models of the step-time bench, each with one batch of random data and its loss."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain.losses import TokenCrossEntropy
from recipes.models import vgg
from scripts.bench.step_networks import LstmTagger, MnistCnn, UNet, resnet

CLASSES = 10
TAGS = 20
TOKENS = 256  # of a decoder's sequences
LLAMA_VOCABULARY = 32_000
WORDS = 10_000  # of the tagger
Inputs = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with the batch that it is trained on.

    Attributes:
        name: as it is asked for.
        title: as it is printed.
        batch: rows of the batch.
        build: the module, in training mode, on the CPU.
        inputs: from (rows, generator) to the module's keyword arguments; a module whose only
            argument is positional has it under ``"x"``.
        classes: of the labels, where they are random classes.
        labels: from (inputs, generator) to the labels; ``None``: a class for each row.
        loss: makes the loss of (output, labels), which has its reduction for an attribute.
    """

    name: str
    title: str
    batch: int
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Inputs]
    classes: int = CLASSES
    labels: Callable[[Inputs, torch.Generator], torch.Tensor] | None = None
    loss: Callable[[], nn.Module] = nn.CrossEntropyLoss

    def data(self, rows: int | None = None) -> tuple[Inputs, torch.Tensor]:
        """One batch of inputs and labels, the same at every call."""
        generator = torch.Generator().manual_seed(1)
        rows = self.batch if rows is None else rows
        if self.labels is None:
            classes = torch.randint(0, self.classes, (rows,), generator=generator)
            return self.inputs(rows, generator), classes
        inputs = self.inputs(rows, generator)
        return inputs, self.labels(inputs, generator)

    def module(self) -> nn.Module:
        """The module, with the same weights at every call."""
        torch.manual_seed(0)
        return self.build().train()


def call(module: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The argument of the loss: the module's output, or the logits in it."""
    output: Any = module(inputs["x"]) if "x" in inputs else module(**inputs)
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return found


def with_position_ids(inputs: Inputs) -> Inputs:
    """The inputs of a transformer with position ids for each example, shape (rows, tokens).

    Left out, the model looks up one row and shares it among all examples, which Opacus's rules
    take for a batch of one.
    """
    if "input_ids" not in inputs:
        return inputs
    rows, tokens = inputs["input_ids"].shape
    positions = torch.arange(tokens, device=inputs["input_ids"].device)
    return {**inputs, "position_ids": positions.expand(rows, tokens).contiguous()}


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)
    )


def _vgg() -> nn.Module:
    return vgg(in_channels=3, classes=CLASSES)


def _bert(**sizes: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_labels=2, **sizes))


def _bert_tiny() -> nn.Module:
    return _bert(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)


def _gpt2(vocabulary: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": TOKENS}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **sizes))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=LLAMA_VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=TOKENS,
            use_cache=False,
        )
    )


def _vit_tiny() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=192,
            num_hidden_layers=12,
            num_attention_heads=3,
            intermediate_size=768,
            image_size=32,
            patch_size=4,
            num_labels=CLASSES,
        )
    )


def _convnext_atto() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(
        ConvNextConfig(
            hidden_sizes=[40, 80, 160, 320],
            depths=[2, 2, 6, 2],
            image_size=64,
            num_labels=CLASSES,
        )
    )


def _images(
    rows: int, generator: torch.Generator, *, name: str = "x", size: int = 32, channels: int = 3
) -> Inputs:
    return {name: torch.randn(rows, channels, size, size, generator=generator)}


def _pixels(size: int) -> Callable[[int, torch.Generator], Inputs]:
    """Images as Hugging Face names them."""
    return functools.partial(_images, name="pixel_values", size=size)


def _images_and_times(rows: int, generator: torch.Generator) -> Inputs:
    images = _images(rows, generator, name="images")
    return {**images, "times": torch.rand(rows, generator=generator)}


def _features(rows: int, generator: torch.Generator) -> Inputs:
    return {"x": torch.randn(rows, 784, generator=generator)}


def _tokens(rows: int, generator: torch.Generator) -> Inputs:
    # From 1 on: 0 is the padding token, whose row of the embedding is not trained.
    ids = torch.randint(1, 30_522, (rows, 128), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _ids(vocabulary: int) -> Callable[[int, torch.Generator], Inputs]:
    """Sequences for a decoder."""
    return lambda rows, generator: {
        "input_ids": torch.randint(1, vocabulary, (rows, TOKENS), generator=generator)
    }


def _words(rows: int, generator: torch.Generator) -> Inputs:
    return {"x": torch.randint(0, WORDS, (rows, 64), generator=generator)}


def _next_tokens(inputs: Inputs, generator: torch.Generator) -> torch.Tensor:
    """The tokens themselves, which the loss shifts."""
    return inputs["input_ids"].clone()


def _tags(inputs: Inputs, generator: torch.Generator) -> torch.Tensor:
    """A tag for every token."""
    return torch.randint(0, TAGS, inputs["x"].shape, generator=generator)


def _noise(inputs: Inputs, generator: torch.Generator) -> torch.Tensor:
    """The noise that a diffusion model is to find."""
    return torch.randn(inputs["images"].shape, generator=generator)


def _cases() -> Iterator[Case]:
    yield Case("vgg", "VGG, 32×32", 256, _vgg, _images)
    yield Case("bert", "BERT-tiny, 128 tokens", 64, _bert_tiny, _tokens, classes=2)
    yield Case("mlp", "MLP 784-512-512-10", 1024, _mlp, _features)
    mnist = functools.partial(_images, size=28, channels=1)
    yield Case("mnist", "Opacus's MNIST CNN", 512, lambda: MnistCnn(CLASSES), mnist)
    yield Case("resnet10", "ResNet-10, GroupNorm, 32×32", 64, lambda: resnet(1, CLASSES), _images)
    yield Case("resnet18", "ResNet-18, GroupNorm, 32×32", 32, lambda: resnet(2, CLASSES), _images)
    decoder = {"labels": _next_tokens, "loss": lambda: TokenCrossEntropy(shift=True)}
    for name, vocabulary in (("gpt2", 5_000), ("gpt2-50k", 50_257)):
        build = functools.partial(_gpt2, vocabulary)
        title = f"GPT-2, 4 layers, 256 wide, 256 tokens, vocabulary {vocabulary:,}"
        yield Case(name, title, 8, build, _ids(vocabulary), **decoder)
    known = _ids(LLAMA_VOCABULARY)
    title = "Llama, 4 layers, 256 wide, 256 tokens, vocabulary 32,000"
    yield Case("llama", title, 8, _llama, known, **decoder)
    yield Case("vit", "ViT-tiny/4, 32×32", 64, _vit_tiny, _pixels(32))
    yield Case("convnext", "ConvNeXt-atto, 64×64", 64, _convnext_atto, _pixels(64))
    unet = {"labels": _noise, "loss": nn.MSELoss}
    yield Case("unet", "diffusion UNet, 32×32", 32, UNet, _images_and_times, **unet)
    tagger = {"labels": _tags, "loss": TokenCrossEntropy}
    lstm = functools.partial(LstmTagger, WORDS, TAGS)
    yield Case("lstm", "LSTM tagger, 64 tokens", 128, lstm, _words, **tagger)
    large = functools.partial(resnet, 2, CLASSES)
    yield Case("resnet18-large", "ResNet-18, GroupNorm, 32×32", 512, large, _images)
    yield Case("bert-base", "BERT-base, 128 tokens", 64, _bert, _tokens, classes=2)


CASES: dict[str, Case] = {case.name: case for case in _cases()}
ON_GPU = ("resnet18-large", "bert-base")
ON_CPU = tuple(name for name in CASES if name not in ON_GPU)


def default_models(device: str) -> list[str]:
    """The large two are for a GPU."""
    return list(CASES) if device.startswith("cuda") else list(ON_CPU)


class Rows(torch.utils.data.Dataset[Any]):
    """As many row numbers as the batch has; the collate function holds the batch itself.

    So that between two timed steps no example is copied, which would cost a private side the
    contents of the caches, and the ordinary one nothing.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.fingerprint = f"{rows} rows of random data"

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        return row


def tensors(inputs: Inputs, labels: torch.Tensor) -> TensorDataset:
    """As a data set, for a loader that is not ours."""
    return TensorDataset(*inputs.values(), labels)
