"""The padding row: numbers vanish, everything else and every shape stays."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from dptrain.sampling.loading.padding import blank

Pair = collections.namedtuple("Pair", ["image", "name"])


@dataclasses.dataclass(frozen=True)
class Record:
    image: torch.Tensor
    name: str
    length: int = dataclasses.field(init=False, default=3)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.tensor([[1, 2]], dtype=torch.int8),
        torch.tensor([True]),
        torch.tensor([1 + 2j]),
        torch.full((2, 3), torch.nan, dtype=torch.bfloat16),
    ],
)
def test_tensor(tensor):
    zeroed = blank(tensor)
    assert zeroed.shape == tensor.shape
    assert zeroed.dtype == tensor.dtype
    assert not zeroed.any()
    assert tensor.any()  # the argument is not written to


def test_numpy():
    zeroed = blank(np.array([[1.0, np.nan]], dtype=np.float16))
    assert zeroed.dtype == np.float16
    assert zeroed.tolist() == [[0.0, 0.0]]
    scalar = blank(np.float32(2))
    assert type(scalar) is np.float32
    assert scalar == 0
    words = np.array(["one", "two"], dtype=object)
    assert blank(words) is words


def test_nested():
    batch = {
        "tokens": torch.ones(1, 4, dtype=torch.long),
        "text": ["a string", b"bytes"],
        "pair": Pair(torch.ones(1, 2), "kept"),
        "many": (torch.ones(()), [torch.ones(1), None, 7]),
        "record": Record(torch.ones(1), "kept"),
    }
    zeroed = blank(batch)
    assert list(zeroed) == list(batch)
    assert zeroed["text"] == ["a string", b"bytes"]
    assert type(zeroed["pair"]) is Pair
    assert zeroed["pair"].name == "kept"
    assert type(zeroed["many"]) is tuple
    assert zeroed["many"][1][1:] == [None, 7]
    assert type(zeroed["record"]) is Record
    assert (zeroed["record"].name, zeroed["record"].length) == ("kept", 3)
    for tensor in (
        zeroed["tokens"],
        zeroed["pair"].image,
        *zeroed["many"][:1],
        zeroed["many"][1][0],
        zeroed["record"].image,
    ):
        assert not tensor.any()
    assert batch["tokens"].all()
    assert batch["record"].image.all()


def test_dictionary_types():
    class Encoding(collections.UserDict):
        pass

    batch = Encoding({"input_ids": torch.ones(1, 3)})
    zeroed = blank(batch)
    assert type(zeroed) is Encoding
    assert not zeroed["input_ids"].any()
    assert batch["input_ids"].all()
    ordered = blank(collections.OrderedDict(x=torch.ones(2)))
    assert type(ordered) is collections.OrderedDict


def test_packed_sequence_keeps_its_structure():
    packed = pack_sequence([torch.ones(3, 2)])
    zeroed = blank(packed)
    assert zeroed.batch_sizes.tolist() == [1, 1, 1]
    assert not zeroed.data.any()
