"""Whether a saved loader state belongs to this scheme and this data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dptrain.core import digest
from dptrain.sampling.scheme import Scheme

FIELDS = {"scheme", "dataset_size", "fingerprint", "seed", "stream"}


def check_state(
    state: dict[str, Any], *, scheme: Scheme, dataset_size: int, known_by: Callable[[], str]
) -> None:
    """Refuse the state of another scheme or data set; cheap checks come first.

    Args:
        state: what a loader's ``state_dict`` gave.
        scheme: of this loader.
        dataset_size: of this loader's data set.
        known_by: computes the fingerprint of this loader's data set.

    Raises:
        TypeError: if the state is no mapping.
        ValueError: saying what differs, and what to do.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state={state!r:.80}: expected what a loader's state_dict() returned")
    if missing := sorted(FIELDS - set(state)):
        raise ValueError(f"the state lacks {missing}; it is no state of a PrivateLoader")
    if state["dataset_size"] != dataset_size:
        raise ValueError(
            f"the state was saved for a dataset of {state['dataset_size']} examples, this one "
            f"has {dataset_size}; resume with the same data"
        )
    if state["scheme"] != digest(scheme.to_dict()):
        raise ValueError(
            "the state was saved for another scheme or other parameters; resume with the "
            f"scheme of the checkpoint, this one is {scheme}"
        )
    if state["fingerprint"] != known_by():
        raise ValueError(
            "the dataset has changed since the state was saved: its rows have other contents; "
            "resume with the same data in the same order"
        )
