"""A small decoder on a text file, one block of characters an example, and then some of its words.

    python -m examples.nanogpt input.txt --steps 500 --epsilon 8

Protected is each block of text: a person who wrote several of them is not protected as a whole, for
which examples/users.py shows the way. The alphabet has to be public, and is ASCII here: one that
were read off the text would be released without noise.
"""

from __future__ import annotations

import argparse
import pathlib
import string
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dptrain import BandMF, Loading, MinSep, PrivacyEngine
from dptrain.losses import causal_cross_entropy

ALPHABET = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))
_NUMBERS = {letter: number for number, letter in enumerate(ALPHABET)}


def encoded(text: str) -> torch.Tensor:
    """Numbers of the characters; what is not of the alphabet counts as a space."""
    return torch.tensor([_NUMBERS.get(letter, _NUMBERS[" "]) for letter in text])


class Block(nn.Module):
    """Causal attention and two dense layers, each with its norm before and around it a sum."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width) to the same."""
        parts = self.read(self.before(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = parts.unbind(2)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.write(seen.transpose(1, 2).flatten(2))
        return x + self.dense(self.between(x))


class Decoder(nn.Module):
    """Characters and their places in, the logits of the next one out."""

    def __init__(
        self, *, context: int, width: int, layers: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.context = context
        self.letters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(layers)])
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, len(ALPHABET), bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(rows, tokens) to (rows, tokens, letters)."""
        # One row of places an example, so that every argument of a layer has a row for each.
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.head(self.last(self.blocks(self.letters(tokens) + self.places(places))))

    @torch.no_grad()
    def say(self, start: str, length: int) -> str:
        """The start and so many characters more, drawn one by one."""
        tokens = encoded(start)[None]
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[:, -1]
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return "".join(ALPHABET[number] for number in tokens[0])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("text", type=pathlib.Path, help="a text file, the private data")
    found.add_argument("--steps", type=int, default=500)
    found.add_argument("-b", "--batch-size", type=int, default=64, help="expected batch size")
    found.add_argument("--lr", type=float, default=1e-3)
    found.add_argument("--context", type=int, default=128, help="characters of an example")
    found.add_argument("--width", type=int, default=64)
    found.add_argument("--layers", type=int, default=2)
    found.add_argument("--heads", type=int, default=4)
    found.add_argument("--bands", type=int, default=4)
    noise = found.add_mutually_exclusive_group()
    noise.add_argument("--epsilon", type=float, help="target, for which σ is found (8)")
    noise.add_argument("--sigma", type=float, help="noise multiplier, instead of a target")
    found.add_argument("--delta", type=float, help="1/(10 N) of N examples, unless given")
    found.add_argument("-c", "--max-per-sample-grad-norm", type=float, default=1.0)
    found.add_argument("--microbatches", type=int, default=1)
    return found


def main(argv: Sequence[str] | None = None) -> str:
    """Train, and return what the model says."""
    options = parser().parse_args(argv)
    tokens = encoded(options.text.read_text(encoding="utf-8"))
    blocks = tokens[: len(tokens) // options.context * options.context].view(-1, options.context)
    model = Decoder(
        context=options.context, width=options.width, layers=options.layers, heads=options.heads
    )
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=options.lr),
        data=DataLoader(TensorDataset(blocks)),
        scheme=MinSep.for_batch_size(
            batch_size=options.batch_size,
            dataset_size=len(blocks),
            min_sep=options.bands,
            steps=options.steps,
        ),
        strategy=BandMF(bands=options.bands),
        max_grad_norm=options.max_per_sample_grad_norm,
        noise_multiplier=options.sigma,
        target_epsilon=None if options.sigma is not None else options.epsilon or 8.0,
        target_delta=options.delta or 0.1 / len(blocks),
        loading=Loading(microbatches=options.microbatches),
    )
    model, optimizer, loader = private
    for (x,) in loader:
        optimizer.zero_grad()
        causal_cross_entropy(model(x), x).backward()  # the mean over each example's own characters
        optimizer.step()
    private.detach()
    print(private.guarantee())
    said = model.eval().say("\n", 200)
    print(said)
    return said


if __name__ == "__main__":
    main()
