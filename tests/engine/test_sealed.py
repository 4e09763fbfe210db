"""A checkpoint of which a bit has changed is refused, wherever the bit is."""

from __future__ import annotations

import copy
import random
import struct

import pytest
import torch

from dptrain.engine.sealed import check_seal, seal
from tests.engine.test_private_training_resume import through_disk
from tests.helpers.engine import flat, images, make, separated, small_net, train


def leaves(value, path=()):
    """Paths of everything that holds data."""
    if isinstance(value, dict):
        for key, held in value.items():
            yield from leaves(held, (*path, key))
    elif isinstance(value, list | tuple):
        for place, held in enumerate(value):
            yield from leaves(held, (*path, place))
    elif value is not None and not (isinstance(value, torch.Tensor) and not value.numel()):
        yield path


def flipped(value, draw):
    """The value with one bit changed."""
    if isinstance(value, torch.Tensor):
        raw = value.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        return raw.view(value.dtype).view(value.shape)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value ^ (1 << draw.randrange(40))
    if isinstance(value, float):
        (bits,) = struct.unpack("<q", struct.pack("<d", value))
        return struct.unpack("<d", struct.pack("<Q", (bits ^ (1 << draw.randrange(63))) % 2**64))[0]
    place = draw.randrange(len(value))
    return value[:place] + chr(ord(value[place]) ^ 1) + value[place + 1 :]


def put(state, path, change):
    """A copy of the state with one value changed; the rest is shared."""
    key, rest = path[0], path[1:]
    new = list(state) if isinstance(state, tuple) else copy.copy(state)
    new[key] = put(state[key], rest, change) if rest else change(state[key])
    return type(state)(new) if isinstance(state, tuple) else new


@pytest.fixture(scope="module")
def state():
    private = make(small_net(), images(), target_delta=1e-3, **separated(24, 10))
    scheduler = torch.optim.lr_scheduler.StepLR(private.optimizer, 3, 0.5)
    private.register_scheduler(scheduler)
    train(private, steps=4, after_step=scheduler.step)
    private.guarantee()
    return through_disk(private.state_dict())


def test_one_bit_anywhere_is_noticed(state):
    private = make(small_net(), images(), target_delta=1e-3, **separated(24, 10))
    private.register_scheduler(torch.optim.lr_scheduler.StepLR(private.optimizer, 3, 0.5))
    before = flat(private.module)
    draw = random.Random(1)
    places = list(leaves(state))
    tensors = {path for path in places if isinstance(_at(state, path), torch.Tensor)}
    assert {path[0] for path in tensors} == {"module", "optimizer", "private"}
    assert {path[1] for path in tensors if path[0] == "private"} >= {"noise", "loader", "rng"}
    # Of Python's generator, 624 numbers, a few are enough.
    many = [p for p in places if p[:3] == ("private", "rng", "python")]
    for path in [*(p for p in places if p not in set(many)), *draw.sample(many, 5)]:
        for _ in range(5 if path in tensors else 1):
            wrong = put(state, path, lambda value: flipped(value, draw))
            with pytest.raises(ValueError, match=r"is damaged.*from a copy|format") as error:
                private.load_state_dict(wrong)
            assert ("format" in str(error.value)) is (path == ("format",))
    assert private.steps_executed == 0
    assert torch.equal(flat(private.module), before)
    private.load_state_dict(state)
    assert private.steps_executed == 4


def _at(value, path):
    for key in path:
        value = value[key]
    return value


def test_what_travels_otherwise_is_the_same():
    """Lists for tuples, views for tensors, another order of storage: the same values."""
    one = {"a": (1, 2.0), "t": torch.arange(6.0).view(2, 3), "e": torch.ones(1).expand(4)}
    turned = one["t"].t().contiguous().t()
    two = {"a": [1, 2.0], "t": turned, "e": torch.ones(4)}
    sealed = seal({**one, "private": {}})
    check_seal({**two, "private": sealed["private"]})
    for change in (
        {"a": (1, 2)},
        {"a": ("1", 2.0)},
        {"a": (True, 2.0)},
        {"a": ((1, 2.0),)},
        {"t": one["t"].double()},
        {"t": one["t"].view(3, 2)},
        {"t": one["t"].view(torch.int32)},
        {"e": one["e"].bfloat16()},
        {"more": None},
        {"a": (1, -2.0)},
    ):
        with pytest.raises(ValueError, match="damaged"):
            check_seal({**one, **change, "private": sealed["private"]})
    zero = seal({"x": 0.0, "private": {}})
    with pytest.raises(ValueError, match="damaged"):
        check_seal({**zero, "x": -0.0})
    empty = torch.empty(0, 3)
    check_seal(seal({"x": empty, "y": torch.tensor(True), "private": {}}))
