"""Check that a saved state is whole and belongs to this run."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from dptrain.core import Guarantee, parts_of
from dptrain.engine.options import GROUPS, MAY_DIFFER
from dptrain.engine.release_ledger import checksum
from dptrain.mechanism import MatrixMechanism

CHECKSUM = "checksum"
_MISSING = object()
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

SHARE = (
    "format",
    "mechanism",
    "mechanism_hash",
    "steps_executed",
    "ledger",
    "ledger_run",
    "share",
)
"""Parts of the share of a rank; that of rank 0 has all the rest of the state as well."""


def shares_of(state: object) -> list[Mapping[str, Any]]:
    """A state, or those that the ranks of a run wrote, in their order."""
    several = isinstance(state, Sequence) and not isinstance(state, str | bytes) and state
    given: list[Any] = list(state) if several else [state]  # type: ignore[call-overload]
    for each in given:
        if not isinstance(each, Mapping):
            raise TypeError(
                f"state is a {type(each).__name__}: must be what private.state_dict() returned, "
                "for instance torch.load(path, weights_only=True), or a list of the shares of all "
                "ranks"
            )
    places = [tuple(each.get("share", (0, 1))) for each in given]
    worlds = {world for _, world in places}
    found = sorted(rank for rank, _ in places)
    if len(worlds) != 1 or found != list(range(worlds.pop())):
        told = ", ".join(f"{rank + 1} of {world}" for rank, world in places)
        raise ValueError(
            f"the state is share {told}, but each rank of the saved run wrote one share "
            "(state_dict(share=True)): give load_state_dict() a list of all shares, each once"
        )
    ordered = [each for _, each in sorted(zip(places, given, strict=True), key=lambda e: e[0])]
    for name in ("format", "mechanism_hash", "steps_executed", "ledger", "ledger_run"):
        if any(each.get(name) != ordered[0].get(name) for each in ordered):
            raise ValueError(
                f"the shares differ in {name}: give the shares of one run, saved after the same "
                "step"
            )
    return ordered


def noise_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The states of the noise in a state: of one stream, or of all ranks' slices of it."""
    held = state["private"]["noise"]
    return list(held) if isinstance(held, list) else [held]


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
            f"{what} is damaged: its values do not match the checksum stored with them. Resume "
            "from a copy or from an earlier checkpoint"
        )


def _digest(state: Any) -> str:
    unsealed = {k: v for k, v in state["private"].items() if k != CHECKSUM}
    found = hashlib.sha256()
    for piece in _pieces({**state, "private": unsealed}):
        found.update(struct.pack("<q", len(piece)))
        found.update(piece)
    return found.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    """All that decides a value, however it traveled: tensors by their bits, on any device."""
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


def on_cpu(value: Any) -> Any:
    """A state with its tensors on the CPU, as another process can read it."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: on_cpu(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_cpu(held) for held in value)
    return value


def check_format(state: Mapping[str, Any], known: int) -> None:
    """Refuse a state of another layout than the one that is known."""
    found = state.get("format")
    if found != known:
        remedy = (
            "it was written by an earlier dptrain: resume with the version that wrote it, or "
            "start a new run, whose guarantee adds to that of the steps already released"
            if isinstance(found, int) and found < known
            else "it is not a state of a private run, or it was written by a later dptrain"
        )
        raise ValueError(f"checkpoint format {found!r} is not {known}: {remedy}")


def check_fields(state: Mapping[str, Any]) -> None:
    """Refuse what is no state of a private run."""
    if missing := sorted(FIELDS - set(state)):
        raise ValueError(f"the checkpoint lacks {missing}: it is not a state of a private run")


def check_settings(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse a state that was written under other options, but for those that may differ."""
    then, now = dict(_leaves(saved)), dict(_leaves(settings))
    names = [
        name
        for name in sorted({*then, *now} - MAY_DIFFER)
        if then.get(name, _MISSING) != now.get(name, _MISSING)
    ]
    if names:
        there = ", ".join(f"{n}={then.get(n)}" for n in names)
        here = ", ".join(f"{n}={now.get(n)}" for n in names)
        raise ValueError(
            f"the checkpoint was written with {there}, and this run has {here}: give make_private "
            "the options of the checkpoint"
        )


def _leaves(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """``{"noise": {"secure": False}}`` as ``"noise.secure", False``."""
    for name, value in settings.items():
        if name in GROUPS and isinstance(value, Mapping):
            yield from ((f"{name}.{field}", option) for field, option in value.items())
        else:
            yield name, value


def check_guarantee(guarantee: Guarantee, mechanism: MatrixMechanism) -> None:
    """Refuse a saved guarantee that is about something else than this run."""
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
            f"the checkpoint holds a guarantee of another mechanism (its {', '.join(wrong)}), so "
            "it was changed after it was written: resume from an unchanged one"
        )
