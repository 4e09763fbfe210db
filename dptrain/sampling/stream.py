"""The base of seeded batch streams: their generator, position and how they are saved."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from dptrain.core import checks, digest
from dptrain.sampling.scheme import BatchStream, Indices, Scheme

# Keeps the batches apart from anything else that is derived from an equal seed.
_DOMAIN = 0x6261746368


def index_dtype(dataset_size: int) -> type[np.signedinteger[Any]]:
    """The narrowest of int32 and int64 that holds every index: state is kept in it."""
    return np.int32 if dataset_size <= np.iinfo(np.int32).max else np.int64


def to_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """A copy as a tensor, which ``torch.load(weights_only=True)`` reads back."""
    return torch.from_numpy(array.copy())


def to_array(
    value: Any, dtype: type[np.signedinteger[Any]], size: int | None = None
) -> npt.NDArray[Any]:
    """A copy of a tensor or an array as a numpy array of the given integer type."""
    if isinstance(value, torch.Tensor):
        value = value.cpu().numpy()
    array = np.array(value, dtype=dtype)
    if size is not None and array.shape != (size,):
        raise ValueError(
            f"the state holds an array of shape {array.shape}, but the scheme needs {size} "
            "entries: it is damaged, so resume from another checkpoint"
        )
    return array


class SeededStream(BatchStream):
    """A batch stream drawn from PCG64-DXSM, keyed by the seed through ``SeedSequence``.

    Subclasses draw with ``self._rng`` in ``_draw`` and name their own state: attributes that hold
    arrays of integers by ``_kept``, without the underscore, and what else there is by
    ``_own_state``.
    """

    _kept: ClassVar[tuple[str, ...]] = ()

    def __init__(self, scheme: Scheme, seed: int) -> None:
        seed = checks.integer("seed", seed, minimum=0, owner=type(scheme).__name__)
        sequence = np.random.SeedSequence(seed, spawn_key=(_DOMAIN,))
        self._rng = np.random.Generator(np.random.PCG64DXSM(sequence))
        self._digest = digest(scheme.to_dict())
        self._name = type(scheme).__name__
        self.steps = scheme.steps
        self.step = 0

    def __next__(self) -> Indices:
        if self.step >= self.steps:
            raise StopIteration
        batch = self._draw()
        self.step += 1
        return batch

    @abstractmethod
    def _draw(self) -> Indices:
        """The batch of step ``self.step``, ascending."""

    def _own_state(self) -> dict[str, Any]:
        """State beyond generator and position: ints, strings and tensors that are copies."""
        return {name: to_tensor(getattr(self, f"_{name}")) for name in self._kept}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Take back what ``_own_state`` gave."""
        for name in self._kept:
            kept = getattr(self, f"_{name}").dtype.type
            setattr(self, f"_{name}", to_array(state[name], kept))

    def state_dict(self) -> dict[str, Any]:
        """Generator, position and availability, as ints, strings and tensors; private data."""
        return {
            "scheme": self._digest,
            "step": self.step,
            # The 128-bit integers of the generator as text: exact, and safe to unpickle.
            "rng": json.dumps(self._rng.bit_generator.state),
            **self._own_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue bit for bit from ``state``.

        Raises:
            ValueError: if the state belongs to another scheme, or is not a stream's state.
        """
        if missing := sorted(set(self.state_dict()) - set(state)):
            raise ValueError(
                f"{self._name}: the state lacks {missing}: it is not a state of a stream"
            )
        if state["scheme"] != self._digest:
            raise ValueError(
                f"{self._name}: the state was saved for another scheme or other parameters (digest "
                f"{str(state['scheme'])[:12]}…, this scheme has {self._digest[:12]}…): resume with "
                "the scheme of the checkpoint"
            )
        self._load_own_state(state)
        self._rng.bit_generator.state = json.loads(state["rng"])
        self.step = int(state["step"])
