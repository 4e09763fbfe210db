"""Whether a saved state is whole, and belongs to this run."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from dptrain.core import Guarantee
from dptrain.engine.module_state import parts_of
from dptrain.engine.release_ledger import checksum
from dptrain.mechanism import MatrixMechanism

CHECKSUM = "checksum"
FIELDS = {
    "mechanism",
    "mechanism_hash",
    "settings",
    "steps_executed",
    "guarantees",
    "notes",
    "module",
    "optimizer",
    "max_grad_norm",
    "schedulers",
    "ledger",
    "ledger_run",
    "ledger_kept",
    "private",
}


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with a checksum over all of its values and tensors, by which damage is noticed.

    It lies in the private part: it depends on what is there.
    """
    return {**state, "private": {**state["private"], CHECKSUM: _digest(state)}}


def check_seal(state: object, what: str = "the checkpoint") -> None:
    """Refuse a state of which anything has changed since ``seal``.

    It is meant for damaged files and for edits by mistake: who wants to can seal anew.

    Raises:
        ValueError: with the remedy.
    """
    private = state.get("private") if isinstance(state, Mapping) else None
    whole = isinstance(private, Mapping) and private.get(CHECKSUM) == _digest(state)
    if not whole:
        raise ValueError(
            f"{what} is damaged: its values are not those that its checksum was taken of when it "
            "was written; go on from a copy or from an earlier one"
        )


def _digest(state: Any) -> str:
    unsealed = {k: v for k, v in state["private"].items() if k != CHECKSUM}
    found = hashlib.sha256()
    for piece in _pieces({**state, "private": unsealed}):
        found.update(struct.pack("<q", len(piece)))
        found.update(piece)
    return found.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    """All that decides a value, however it travelled: tensors by their bits, on any device."""
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)} {checksum(parts_of(value))}".encode()
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        yield f"array {array.dtype} {array.shape}".encode()
        yield array.tobytes()
    elif isinstance(value, float):
        yield b"float" + struct.pack("<d", value)
    elif isinstance(value, bytes):
        yield b"bytes" + value
    elif value is None or isinstance(value, str | int):
        yield f"{type(value).__name__} {value}".encode(errors="surrogatepass")
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key, held in value.items():
            yield from _pieces(key)
            yield from _pieces(held)
    elif isinstance(value, Set):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, Sequence):
        yield f"sequence {len(value)}".encode()
        for held in value:
            yield from _pieces(held)
    else:  # of a scheduler, say, whose state may hold functions; files hold none
        yield type(value).__qualname__.encode()


def check_fields(state: Mapping[str, Any]) -> None:
    """Refuse what is no state of a private run.

    Raises:
        ValueError: naming what is missing.
    """
    if missing := sorted(FIELDS - set(state)):
        raise ValueError(f"the checkpoint lacks {missing}; it is no state of a private run")


def check_settings(saved: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse a state that was written under other settings.

    Raises:
        ValueError: naming those that differ, with both values.
    """
    names = [n for n in sorted({*settings, *saved}) if saved.get(n) != settings.get(n)]
    if names:
        there = ", ".join(f"{n}={saved.get(n)}" for n in names)
        here = ", ".join(f"{n}={settings.get(n)}" for n in names)
        raise ValueError(
            f"the checkpoint was written with {there}, this run has {here}: give make_private "
            "what the checkpoint has"
        )


def check_guarantee(guarantee: Guarantee, mechanism: MatrixMechanism) -> None:
    """Refuse a saved guarantee that is about something else than this run.

    Raises:
        ValueError: naming the fields that differ.
    """
    about = {
        "mechanism_hash": mechanism.hash,
        "noise_multiplier": mechanism.noise_multiplier,
        "scheme": mechanism.scheme.published(),
        "strategy_hash": mechanism.strategy.coefficient_hash,
        "unit": mechanism.scheme.unit,
        "steps_planned": mechanism.steps,
    }
    if wrong := [name for name, value in about.items() if getattr(guarantee, name) != value]:
        raise ValueError(
            f"the checkpoint holds a guarantee of another mechanism (its {', '.join(wrong)}): "
            "it was changed after it was written; go on from one that was not"
        )
