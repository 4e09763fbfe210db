"""The choice of the examples that the users of a batch contribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from dptrain.core import checks
from dptrain.sampling.scheme import BatchStream, Indices, Scheme
from dptrain.sampling.stream import SeededStream
from dptrain.sampling.users.graph_edges import Offsets

# Keeps the choice of examples apart from the draws of users with an equal seed: the accountants'
# laws need the two to be independent (docs/theory/users.md#thm-users-averaged).
_DOMAIN = 0x7069636B
_USERS = "users."  # begins the names of what the stream of users keeps


class OwnExamples:
    """The examples of every user, in compressed rows.

    Args:
        offsets: int64, shape (users + 1,).
        examples: int64; user u has ``examples[offsets[u]:offsets[u + 1]]``, ascending.
    """

    def __init__(self, offsets: Offsets, examples: Indices) -> None:
        self.offsets, self.examples = offsets, examples

    def choose(self, rng: np.random.Generator, users: Indices, most: int) -> Indices:
        """``most`` examples of each user, every subset being as likely; all where there are fewer.

        Args:
            rng: draws one number for every example of the users who have more.
            users: distinct, ascending.
            most: G ≥ 1.

        Returns:
            int64, ascending.
        """
        sizes = self.offsets[users + 1] - self.offsets[users]
        row = np.repeat(np.arange(len(users)), sizes)
        within = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        candidates = self.examples[self.offsets[users][row] + within]
        many = sizes[row] > most
        keys = np.zeros(len(row))
        keys[many] = rng.random(int(many.sum()))
        # The examples of a user by their keys: of those who have no more than G all come first.
        order = np.lexsort((within, keys, row))
        chosen = candidates[order[within < most]]
        chosen.sort()
        return chosen

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # immutable, and its arrays may be large


class PerUserStream(SeededStream):
    """Batches of ``PerUser``: the examples that the users of a step contribute, ascending."""

    def __init__(
        self, scheme: Scheme, users: BatchStream, own: OwnExamples, group_size: int, seed: int
    ) -> None:
        super().__init__(scheme, seed)
        seed = checks.integer("seed", seed, minimum=0)
        sequence = np.random.SeedSequence(seed, spawn_key=(_DOMAIN,))
        self._rng = np.random.Generator(np.random.PCG64DXSM(sequence))
        self._users = users
        self._own = own
        self._group_size = group_size

    def _draw(self) -> Indices:
        return self._own.choose(self._rng, next(self._users), self._group_size)

    def _own_state(self) -> dict[str, Any]:
        return {_USERS + name: value for name, value in self._users.state_dict().items()}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        known = self._users.state_dict()
        if state[_USERS + "step"] != state["step"]:
            raise ValueError(
                f"{self._name}: the state is of step {state['step']}, and of step "
                f"{state[_USERS + 'step']} where users are drawn; resume with a whole state"
            )
        self._users.load_state_dict({name: state[_USERS + name] for name in known})
