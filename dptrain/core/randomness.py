"""Seeds, and the state of the global random generators that training code draws from."""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from dptrain.core import checks

_HOST = {"torch", "numpy", "python"}  # in states of generators; the others are of devices


def split_seed(seed: int | None) -> tuple[int, int, int]:
    """Unrelated 128-bit keys: for sampling, for noise, and for the global generators.

    Args:
        seed: a non-negative integer for a reproducible run, ``None`` for fresh entropy.

    Raises:
        TypeError: if the seed is not an integer.
        ValueError: if it is negative.
    """
    if seed is None:
        return secrets.randbits(128), secrets.randbits(128), secrets.randbits(128)
    children = np.random.SeedSequence(checks.integer("seed", seed, minimum=0)).spawn(3)
    words = [child.generate_state(2, np.uint64) for child in children]
    first, second, third = (int(high) << 64 | int(low) for high, low in words)
    return first, second, third


def seed_globals(seed: int) -> None:
    """Seed the generators of torch (on all devices; 63 bits), numpy (128) and Python (all)."""
    torch.manual_seed(seed % 2**63)
    np.random.seed([seed >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)])  # noqa: NPY002
    random.seed(seed)


@contextlib.contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Seed the global generators of random, numpy and torch (CPU), and put them back after."""
    python, legacy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - datasets use numpy's global generator
    # Not torch.manual_seed, which would also reset the generators of the accelerators.
    torch.default_generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.set_rng_state(torch_state)


def remember_globals() -> Callable[[], dict[str, Any]]:
    """``global_state`` of this moment, put into plain values when it is asked for."""
    torch_state = torch.get_rng_state()
    devices = _device_states()
    _, key, pos, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    python = random.getstate()

    def plain() -> dict[str, Any]:
        return {
            "torch": torch_state,
            "cuda": [],
            **devices,
            "numpy": {
                "key": torch.from_numpy(np.asarray(key).astype(np.int64)),
                "pos": int(pos),
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            },
            "python": python,
        }

    return plain


def global_state() -> dict[str, Any]:
    """State of the generators of torch (CPU, devices), numpy and Python, as plain values."""
    return remember_globals()()


def _device_states() -> dict[str, list[torch.Tensor]]:
    """The state of the generator of every device that torch computes on, by their kind."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return {}
    module = torch.get_device_module(kind)
    if not getattr(module, "is_initialized", module.is_available)():
        return {}
    devices = [torch.device(kind.type, index) for index in range(module.device_count())]
    return {kind.type: [module.get_rng_state(device) for device in devices]}


def same_global_state(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """True if no generator was used between two calls of ``global_state``."""
    return (
        torch.equal(ours["torch"], theirs["torch"])
        and all(
            torch.equal(a, b)
            for kind in ours.keys() & theirs.keys() - _HOST
            for a, b in zip(ours[kind], theirs[kind], strict=False)
        )
        and ours["numpy"]["pos"] == theirs["numpy"]["pos"]
        and torch.equal(ours["numpy"]["key"], theirs["numpy"]["key"])
        and bool(ours["python"] == theirs["python"])
    )


def restore_global_state(state: dict[str, Any]) -> None:
    """Put back what ``global_state`` returned."""
    torch.set_rng_state(state["torch"])
    kind = torch.accelerator.current_accelerator()
    if kind is not None and kind.type in state:
        module = torch.get_device_module(kind)
        for index, own in enumerate(state[kind.type][: module.device_count()]):
            module.set_rng_state(own, torch.device(kind.type, index))  # there may be fewer now
    legacy = state["numpy"]
    key = legacy["key"].numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002
        ("MT19937", key, legacy["pos"], legacy["has_gauss"], legacy["gauss"])
    )
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
