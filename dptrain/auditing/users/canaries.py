"""One run of the real engine in which users of a shared graph are the canaries.

The examples of a canary have one coordinate of the model together, and one coin says whether all of
them have a gradient. No two canaries share an example, so that taking one out is what the guarantee
is about, whatever the others' coins say. Laws of their draws differ, and those that are in are not
those that are out: canaries are numbered in random order, so that both are samples of one crowd.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from dptrain.auditing.canaries import FEWEST, CanaryRun, play
from dptrain.auditing.draws import key
from dptrain.auditing.laws import Game, whitening_matrix
from dptrain.auditing.users.game import UserGame, audited_scheme, scored
from dptrain.auditing.users.members import Lookup, Members, apart
from dptrain.core import checks
from dptrain.engine import Gradients
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import UserMinSep


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UserCanaryRun(CanaryRun):
    """The releases of one run with users as canaries.

    Attributes:
        users: the number of each canary in the graph, in random order, shape (m,).
        examples: how many examples each has, shape (m,).
    """

    users: tuple[int, ...]
    examples: tuple[int, ...]

    @property
    def who(self) -> str:
        """The name of the canaries, in words."""
        least, most = min(self.examples), max(self.examples)
        sizes = f"{least} to {most}" if least < most else f"{most}"
        return f"users of {sizes} example{'s' * (most > 1)} as canaries"

    def games(self, mechanism: MatrixMechanism) -> list[tuple[Game, npt.NDArray[np.int64]]]:
        """A game for each law of draws, and the canaries who follow it.

        Raises:
            ValueError: if there is none of the mechanism, or its graph is another one.
        """
        scheme = audited_scheme(mechanism)
        sizes = scheme.graph.examples_per_user()
        if max(self.users) >= len(sizes) or tuple(sizes[list(self.users)]) != self.examples:
            raise ValueError(
                f"mechanism: the users of its graph ({len(sizes)} users) do not have as many "
                "examples as the canaries of the run: pass the mechanism that ran"
            )
        lookup, matrix = Lookup(scheme.graph), whitening_matrix(mechanism)
        laws: dict[bytes, tuple[UserGame, list[int]]] = {}
        for row, user in enumerate(self.users):
            mine = lookup.examples(user)
            game = UserGame(
                mechanism=mechanism,
                matrix=matrix,
                scheme=scheme,
                members=Members(user, mine, groups=()),
                rows=(mine,),
            )
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
    """Train with the real engine on a graph in which some users are canaries.

    Args:
        mechanism: with ``UserCyclic`` or ``UserMinSep``, the edges of its graph, and σ > 0.
        canaries: the most users, at least 8; those who are likely to lose most, if there are more
            of whom no two share an example. Where neighbors are barred, users who share none with
            anybody.
        spare: k, coordinates without a canary.
        layers: of the model; canaries lie in all of them.
        max_grad_norm: R.
        gradients: how the engine forms and clips gradients.
        seed: of the coins and of the run.
        progress: show a bar.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if there is no game of the mechanism (as of ``user_game``), fewer than 8 such
            users, or an argument is out of range.
    """
    checks.instance("mechanism", mechanism, MatrixMechanism)
    scheme = audited_scheme(mechanism)
    canaries = checks.integer("canaries", canaries, minimum=FEWEST)
    spare = checks.integer("spare", spare, minimum=2)
    seed = checks.integer("seed", seed, minimum=0)
    lookup = Lookup(scheme.graph)
    # In the order of their exposure the halves that ``count`` makes would be of different users.
    rng = np.random.default_rng(key(seed, 2))
    users: list[int] = rng.permutation(apart(scheme, lookup, canaries)).tolist()
    if len(users) < FEWEST:
        shared = isinstance(scheme, UserMinSep) and scheme.min_sep > 1
        reason = (
            f"share no example with anybody, and with min_sep={scheme.min_sep} the draws of a user "
            "who does show in who else is missing; audit_users looks for that"
            if shared
            else "share no example with each other"
        )
        raise ValueError(
            f"{len(users)} users of the graph could be canaries, who {reason}. An audit takes "
            f"{FEWEST}, and to show much it takes hundreds"
        )
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
