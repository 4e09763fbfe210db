"""Bad arguments and bad files: each is refused in words of ours, or means what it says.

Arguments are those of ``tests/core``, with values put together at random. Files are damaged
by flipped bits, cut off, or edited as JSON and written anew, with a fresh digest where there is
one: reading one ends in a ValueError, or in a value that is whole.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import random
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import dptrain
from dptrain.core import Guarantee
from dptrain.engine import StepLedger
from recipes.runfolder import CHECKPOINT, load_checkpoint
from scripts.attack.harness import Finding, Part
from tests.core.test_checks_bad_arguments import MECHANISM, cases, make_private
from tests.recipes.test_resume import _same

_LONGEST = 20.0  # seconds until a refusal


def _odd(rng: random.Random) -> Any:
    """A value that hardly any argument means."""
    number = rng.choice([0, -1, 1, 2**63, 10**30, -0.0, 1e-320, 1e308, float("nan"), float("inf")])
    makers: list[Callable[[], Any]] = [
        lambda: number,
        lambda: str(number),
        lambda: [number],
        lambda: {"x": number},
        lambda: np.array([number], dtype=object),
        lambda: np.float32(1e38),
        lambda: torch.full((rng.randint(0, 3),), 1.0),
        lambda: complex(1, 1),
        lambda: None,
        lambda: rng.choice([True, False]),
        lambda: object,
        lambda: lambda: number,
        lambda: "".join(chr(rng.randrange(1, 0x2FF)) for _ in range(rng.randint(0, 40))),
        lambda: bytes(rng.randrange(256) for _ in range(8)),
        lambda: MECHANISM,
    ]
    return rng.choice(makers)()


def bad_argument(rng: random.Random) -> None:
    """One argument of one public call; a value that it takes must be taken without harm.

    Odd text is a fine name of a file, for a ledger too: the call is made in a folder of its own.
    """
    call, right, argument, _ = rng.choice(cases()).values
    value = _odd(rng)
    started = time.monotonic()
    where = f"{getattr(call, '__qualname__', call)}({argument}={value!r:.80})"
    try:
        with (
            tempfile.TemporaryDirectory(prefix="attack-") as folder,
            contextlib.chdir(folder),
        ):
            call(**{**right, argument: value})
    except (TypeError, ValueError) as error:
        told = str(error)
        if not re.search(rf"\b{argument}\b", told) or "\n" in told:
            raise Finding(f"{where}: {type(error).__name__}: {told[:300]!r}") from error
    except ModuleNotFoundError:
        pass
    took = time.monotonic() - started
    if took > _LONGEST:
        raise Finding(f"{where}: took {took:.0f} s")


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """The bytes with a few bits flipped, cut off, or with a piece doubled or taken out."""
    kind = rng.choice(["flip", "flip", "cut", "double", "remove"])
    at = rng.randrange(len(whole))
    if kind == "flip":
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    length = rng.randint(1, max(1, len(whole) // 10))
    end = {"cut": len(whole), "double": at, "remove": at + length}[kind]
    return whole[:at] + (whole[at - length : at] if kind == "double" else b"") + whole[end:]


def edited(value: Any, rng: random.Random) -> Any:
    """A JSON value with one entry, at any depth, changed, dropped or added."""
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        kind = rng.random()
        if kind < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.2:
            return {**value, rng.choice(["extra", "type", "format"]): rng.choice([1, "x", None])}
        return {**value, key: edited(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [edited(v, rng) if i == at else v for i, v in enumerate(value)]
    return rng.choice(
        [None, True, "x", "", [], {}, -1, 0, 1.5, 1e308, -1e-300, 10**30, [[1]], "nan", value]
    )


@functools.cache
def _guarantee() -> Guarantee:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dptrain.account(MECHANISM, delta=1e-3)


@functools.cache
def _checkpoint() -> bytes:
    from recipes.runfolder import RunFolder

    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        run = RunFolder.__new__(RunFolder)
        run.path = pathlib.Path(folder)
        run.save_checkpoint({"private": {}, "run": make_private(seed=1).state_dict()})
        return (run.path / CHECKPOINT).read_bytes()


def bad_json(rng: random.Random) -> None:
    """A mechanism or a guarantee: refused, or equal to itself once written and read again."""
    kind: Any = rng.choice([dptrain.MatrixMechanism, Guarantee])
    text = (MECHANISM if kind is dptrain.MatrixMechanism else _guarantee()).to_json()
    if rng.random() < 0.4:
        changed: Any = damaged(text.encode(), rng).decode(errors="replace")
    else:
        changed = json.dumps(edited(json.loads(text), rng))
    try:
        found = kind.from_json(changed)
    except ValueError:
        return
    if kind.from_json(found.to_json()) != found:
        raise Finding(f"{kind.__name__}: {changed[:500]} is read as what does not read as itself")
    if kind is Guarantee and not (found.epsilon >= 0 and 0 <= found.delta <= 1 and str(found)):
        raise Finding(f"Guarantee: {changed[:500]} is read")


def bad_checkpoint(rng: random.Random) -> None:
    """A damaged checkpoint is noticed, or nothing of it has changed."""
    whole = _checkpoint()
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        path = pathlib.Path(folder, CHECKPOINT)
        path.write_bytes(whole)
        saved = load_checkpoint(folder)
        path.write_bytes(damaged(whole, rng))
        try:
            found = load_checkpoint(folder)
        except ValueError as error:
            if "is damaged" not in str(error):
                raise Finding(f"checkpoint: {error}") from error
            return
        if not _same(found, saved):
            raise Finding("a checkpoint was damaged, and read as another one")


def bad_ledger(rng: random.Random) -> None:
    """A damaged ledger is refused with a sentence, or opened."""
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        path = pathlib.Path(folder, "ledger.jsonl")
        private = make_private(seed=1, ledger=path)
        module, optimizer, loader = private
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
            if step == 2:
                private.end_early()
                break
        path.write_bytes(damaged(path.read_bytes(), rng))
        try:
            StepLedger(MECHANISM.hash, path)
        except (ValueError, RuntimeError) as error:
            if not str(error) or "Traceback" in str(error):
                raise Finding(f"ledger: {error!r}") from error


KINDS = (bad_argument, bad_argument, bad_json, bad_json, bad_checkpoint, bad_ledger)


def case(seed: int) -> int:
    """One bad argument or file."""
    rng = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        KINDS[seed % len(KINDS)](rng)
    return 1


PART = Part("inputs", "bad inputs", case)
