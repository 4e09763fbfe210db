"""Released weights as safetensors, with the key facts of their guarantee in the file."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from torch import nn

from dptrain.core import Guarantee, Kind, checks
from dptrain.engine import PrivateTraining

KEY = "differential_privacy"
"""Of the metadata of a file of weights, and of a model card: JSON of ``key_facts``."""
TAGS = ("differential-privacy", "dptrain")
"""Of a model card."""


def key_facts(guarantee: Guarantee) -> dict[str, Any]:
    """Facts for a program that comes upon the weights; the statement has all of them.

    Returns:
        JSON-ready values by name; an infinite ε is the text "inf".
    """
    epsilon = float(guarantee.epsilon)
    return {
        "epsilon": "inf" if epsilon == float("inf") else epsilon,
        "delta": float(guarantee.delta),
        "unit": guarantee.unit.noun,
        "adjacency": guarantee.adjacency.value,
        "kind": guarantee.kind.value,
        "is_estimate": guarantee.kind is Kind.ESTIMATE,
        "accountant": guarantee.accountant,
        "noise_multiplier": float(guarantee.noise_multiplier),
        "steps_planned": guarantee.steps_planned,
        "steps_executed": guarantee.steps_executed,
        "mechanism_hash": guarantee.mechanism_hash,
    }


def save_released(
    private: PrivateTraining, path: str | os.PathLike[str], *, delta: float | None = None
) -> Guarantee:
    """Save the weights of a private run as safetensors, with the key facts of its guarantee.

    Reading the file executes no code: ``safetensors.torch.load_model(model, path)``, and
    ``facts_of_weights(path)`` for the facts. Buffers are saved with the parameters, and tied
    weights once. Neither the noise nor anything else of the run is in it.

    Args:
        private: the run, between two steps or detached.
        path: of the file; an old one is replaced at once or not at all.
        delta: δ; ``None`` is the target of ``make_private``.

    Returns:
        The guarantee, to be published with the weights (``privacy_report``).

    Raises:
        TypeError: if ``private`` is no run.
        ValueError: if there is no δ to speak of.
        RuntimeError: if the weights are not what the run released: a step was interrupted, the
            module holds what a forward pass left behind, or was trained further after ``detach``.
        ImportError: if safetensors is not installed.
    """
    checks.instance("private", private, PrivateTraining, example="make_private(...)")
    module = private.released_module()
    guarantee = private.guarantee(delta)
    write_weights(module, path, guarantee=guarantee)
    return guarantee


def write_weights(
    module: nn.Module, path: str | os.PathLike[str], *, guarantee: Guarantee | None = None
) -> None:
    """Write a module's weights as safetensors; the caller knows whose guarantee they have.

    Args:
        module: whose parameters and buffers are written, tied ones once.
        path: of the file; an old one is replaced at once or not at all.
        guarantee: whose key facts go into the file.

    Raises:
        ImportError: if safetensors is not installed.
    """
    try:
        from safetensors.torch import save_model
    except ImportError as error:
        raise _missing() from error
    metadata = {"format": "pt"}
    if guarantee is not None:
        facts = json.dumps(key_facts(guarantee), sort_keys=True, ensure_ascii=False)
        metadata[KEY] = facts
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_model(module, str(temporary), metadata=metadata)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def facts_of_weights(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The key facts that ``save_released`` put into a file of weights, or ``None``.

    They are the word of whoever wrote the file.

    Raises:
        ImportError: if safetensors is not installed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise _missing() from error
    with safe_open(os.fspath(path), "pt") as file:
        metadata = file.metadata() or {}
    facts = metadata.get(KEY)
    return None if facts is None else dict(json.loads(facts))


def _missing() -> ImportError:
    return ImportError(
        "weights are written and read by the package safetensors, which is not installed: "
        'pip install "dptrain[safetensors]"'
    )
