"""One run of the real engine in which users of a shared graph are the canaries.

The examples of a canary have one coordinate of the model together, and one coin says whether all of
them have a gradient. No two canaries share an example, so that taking one out is what the guarantee
is about, whatever the others' coins say.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from dptrain.auditing.canaries import CanaryRun, play
from dptrain.auditing.laws import Game
from dptrain.auditing.users.game import UserGame, audited_scheme, scored, user_game
from dptrain.auditing.users.members import Lookup, Members, apart
from dptrain.core import checks
from dptrain.engine import Gradients
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import UserMinSep


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UserCanaryRun(CanaryRun):
    """What one run with users as canaries released.

    Attributes:
        users: the number of each canary in the graph, shape (m,).
        examples: how many examples each has, shape (m,).
    """

    users: tuple[int, ...]
    examples: tuple[int, ...]

    @property
    def who(self) -> str:
        """What the canaries are, in words."""
        least, most = min(self.examples), max(self.examples)
        sizes = f"{least} to {most}" if least < most else f"{most}"
        return f"users of {sizes} example{'s' * (most > 1)} as canaries"

    def games(self, mechanism: MatrixMechanism) -> list[tuple[Game, npt.NDArray[np.int64]]]:
        """A game for each law of draws, and the canaries who follow it.

        Raises:
            ValueError: if there is none of the mechanism.
        """
        first = user_game(mechanism, self.users[0])
        lookup = Lookup(audited_scheme(mechanism).graph)
        laws: dict[bytes, tuple[UserGame, list[int]]] = {}
        for row, user in enumerate(self.users):
            members = Members(user, lookup.examples(user), groups=())
            game = dataclasses.replace(first, members=members, inexact="")
            laws.setdefault(game.coins().examples.tobytes(), (game, []))[1].append(row)
        return [(scored(game), np.array(rows)) for game, rows in laws.values()]


def run_user_canaries(
    mechanism: MatrixMechanism,
    *,
    canaries: int = 1000,
    spare: int = 1000,
    layers: int = 2,
    max_grad_norm: float = 1.0,
    gradients: Gradients = Gradients(),
    seed: int = 0,
    progress: bool = True,
) -> UserCanaryRun:
    """Train with the real engine on a graph of whose users some are canaries.

    Args:
        mechanism: with ``UserCyclic`` or ``UserMinSep``, the edges of its graph, and σ > 0.
        canaries: the most users; those who are likely to lose most, if there are more of whom no
            two share an example. Where neighbors are barred, users who share none with anybody.
        spare: k, coordinates without a canary.
        layers: of the model; canaries lie in all of them.
        max_grad_norm: R.
        gradients: how the engine forms and clips gradients.
        seed: of the coins and of the run.
        progress: show a bar.

    Raises:
        ValueError: if there is no game of the mechanism (``user_game``), fewer than two such users,
            or an argument is out of range.
    """
    checks.instance("mechanism", mechanism, MatrixMechanism)
    scheme = audited_scheme(mechanism)
    canaries = checks.integer("canaries", canaries, minimum=2)
    spare = checks.integer("spare", spare, minimum=2)
    lookup = Lookup(scheme.graph)
    users = apart(scheme, lookup, canaries)
    if len(users) < 2:
        shared = isinstance(scheme, UserMinSep) and scheme.min_sep > 1
        reason = (
            f"share no example with anybody, and with min_sep={scheme.min_sep} the draws of a user "
            "who does show in who else is missing; audit_users looks for that"
            if shared
            else "share no example with each other"
        )
        raise ValueError(f"{len(users)} users of the graph could be canaries, who {reason}")
    user_game(mechanism, users[0])
    layers = checks.integer("layers", layers, maximum=len(users) + spare)
    owners, sizes = np.full(scheme.dataset_size, -1), []
    for number, user in enumerate(users):
        rows = lookup.examples(user)
        owners[rows] = number
        sizes.append(len(rows))
    found = play(
        mechanism,
        owners,
        spare=spare,
        layers=layers,
        max_grad_norm=max_grad_norm,
        gradients=gradients,
        individual=None,
        seed=seed,
        progress=progress,
    )
    values = {each.name: getattr(found, each.name) for each in dataclasses.fields(found)}
    return UserCanaryRun(**values, users=tuple(users), examples=tuple(sizes))
