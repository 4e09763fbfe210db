"""The game in which somebody tells from a release whether a user's examples were in it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from dptrain.auditing.counting import StatedCurve
from dptrain.auditing.draws import key, noises
from dptrain.auditing.laws import Game, NoLikelihood, Played, whitening_matrix
from dptrain.auditing.likelihood import MOST_STATES, Likelihood, orthogonal_from
from dptrain.auditing.mechanism_audit import MechanismAudit, audit_game
from dptrain.auditing.users.chains import UserChain, UserCoins, enumerated
from dptrain.auditing.users.members import Lookup, Members, Rows, crowd, most_exposed, twins
from dptrain.auditing.users.silence import Silence, check_states
from dptrain.core import Array, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import PerUser, Scheme, UserCyclic, UserMinSep

_FACTORS = (1.5, 2.5, 5.0)  # by which tilted runs raise the probability of the draws
_MOST_SUBSETS = 12  # examples of a user whose subsets are gone through


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UserGame(Game):
    """One user of a public graph: y = M x + σ z against σ z, x_t of its examples being in batch t.

    All of the user's examples have the same unit gradient. Where nothing of the others depends on
    the user's coins, what they contribute is known to the reader and says nothing: the game is this
    one, and its likelihood ratio is exact.

    Attributes:
        members: the user and its neighbors.
        rows: examples of the user, and others whose numbers in batches are further draws of x.
    """

    members: Members
    rows: tuple[Rows, ...]

    @property
    def who(self) -> str:
        """The word for what is there or not: users."""
        return "users"

    @property
    def audited(self) -> dict[str, int]:
        """The user, and how many examples, neighbors and users of its law there are."""
        return {
            "user": self.members.user,
            "examples": len(self.members.examples),
            "neighbors": self.members.neighbors,
            "per_stream": len(self.rows),
        }

    def coins(self, scheme: Scheme | None = None) -> UserCoins:
        """The law of x without regard to neighbors."""
        return user_coins(scheme or self.scheme, self.members.examples)

    def likelihood(self, scheme: Scheme | None = None) -> Likelihood:
        """The exact ratio under the scheme, or under one of ``denser``.

        Raises:
            NoLikelihood: if columns of the strategy overlap at the user's steps too much.
        """
        coins = self.coins(scheme)
        turns = np.flatnonzero(coins.examples)
        if orthogonal_from(self.matrix[:, turns], 1 if coins.min_sep == 1 else coins.min_sep):
            return UserChain(matrix=self.matrix, sigma=self.sigma, coins=coins)
        if (found := enumerated(coins, self.matrix, self.sigma, MOST_STATES)) is not None:
            return found
        raise NoLikelihood(
            "columns of the strategy overlap at steps at which the user may take part, in more "
            f"than {MOST_STATES} patterns: audit a strategy with bands <= {self.scheme.min_sep}, "
            "the separation of a user's participations"
        )

    def scores(self, outputs: Array) -> Array:
        """log (P/Q)(y), or its formula for columns that do not overlap where these do."""
        if not self.inexact:
            return self.likelihood().log_ratio(outputs)
        chain = UserChain(matrix=self.matrix, sigma=self.sigma, coins=self.coins())
        return chain.log_ratio(outputs)

    def draws(self, count: int, seed: int, scheme: Scheme | None = None) -> Array:
        """Independent x from streams of the scheme, as loaders open them; shape (count, n)."""
        scheme = scheme or self.scheme
        found = np.zeros((count, scheme.steps))
        done = number = 0
        while done < count:
            taken = _taken(scheme, self.rows[: count - done], key(seed, number))
            found[done : done + len(taken)] = taken
            done, number = done + len(taken), number + 1
        return found

    def denser(self) -> list[Scheme]:
        """The scheme with larger probabilities of every example."""
        scheme = self.scheme
        if isinstance(scheme, UserMinSep):
            rates = [factor * scheme.probability for factor in _FACTORS]
            return [dataclasses.replace(scheme, probability=r) for r in rates if r < 0.9]
        assert isinstance(scheme, UserCyclic)
        largest = 0.9 * min(scheme.partition.sizes)
        sizes = [factor * scheme.batch_size for factor in _FACTORS]
        return [dataclasses.replace(scheme, batch_size=size) for size in sizes if size <= largest]

    def mean(self) -> Array:
        """The chance of x_t > 0."""
        return self.coins().rates()

    def rates(self) -> Array | None:
        """The chance of x_t > 0, neighbors regarded; ``None`` if it is not known."""
        return self.mean()

    @property
    def forgetful(self) -> bool:
        """True if nobody is barred, so that every step has coins of its own."""
        return self.coins().min_sep == 1

    def several(self) -> Array | None:
        """The chance of x_t > 1 given x_t > 0: coins are tossed for each example by itself.

        Whether the user is barred says nothing of how many of its coins come up in another step.
        """
        coins = self.coins()
        found = np.zeros(coins.steps)
        for t in np.flatnonzero(coins.examples).tolist():
            none, one = coins.counts(t)[:2]
            found[t] = (1.0 - none - one) / (1.0 - none)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NeighborGame(UserGame):
    """A user whose coins bar others: these have gradients too, and the reader sees their sums.

    Examples outside that share a user with the same ones of the user's examples have one unit
    gradient, orthogonal to all else. Their sums carry noise as any other; who is missing there
    shows what the user drew. Which batches are drawn has one law in both worlds.

    Attributes:
        crowd: the user, and others whose batches are independent of the user's.
    """

    crowd: tuple[Members, ...]

    def likelihood(self, scheme: Scheme | None = None) -> Likelihood:
        """Refuse: there is no exact ratio, as the reader sees more outputs than the user's.

        Raises:
            NoLikelihood: always.
        """
        raise NoLikelihood(
            "who else takes part depends on what the user drew; runs are counted by the score of "
            "a reader who looks which neighbors are missing"
        )

    def denser(self) -> list[Scheme]:
        """No schemes: nothing is weighted."""
        return []

    def several(self) -> Array | None:
        """Not known: some of the user's examples may be barred and others not."""
        return None

    def rates(self) -> Array | None:
        """The chance of x_t > 0 under exclusion by sampled examples.

        Of the examples A of the user that come up, one at least has no neighbor's coin in the last
        b - 1 steps: by inclusion and exclusion over A.
        """
        scheme = self.scheme
        assert isinstance(scheme, UserMinSep)
        mine = self.members.examples
        if scheme.exclusion != "sampling" or len(mine) > _MOST_SUBSETS:
            return None
        p, found = scheme.probability, np.zeros(scheme.steps)
        near = np.zeros((1 << len(mine)), dtype=np.int64)  # neighbors of a subset, D_u without
        for subset in range(1, len(near)):
            own = {place for place in range(len(mine)) if subset >> place & 1}
            near[subset] = sum(len(r) for g, r in self.members.groups if own & set(g)) + len(mine)
        sizes = np.array([subset.bit_count() for subset in range(len(near))])
        for t in range(scheme.steps):
            window = min(scheme.min_sep - 1, t + scheme.burn_in)
            terms = (-p) ** sizes * (1.0 - p) ** (window * near)
            found[t] = -float(terms[1:].sum())
        return found

    def runs(self, count: int, seed: int) -> tuple[Array, Array]:
        """x, shape (count, n), and the numbers of neighbors in every batch, (count, groups, n)."""
        size, several = 1 + len(self.members.groups), len(self.crowd)
        place = np.full(self.scheme.dataset_size, several * size)  # of whom nobody looks at
        for number, each in enumerate(self.crowd):
            place[each.examples] = number * size
            for group, (_, rows) in enumerate(each.groups, start=1):
                place[rows] = number * size + group
        found = np.zeros((-(-count // several), several, size, self.scheme.steps))
        for run, one in enumerate(found):
            for t, batch in enumerate(self.scheme.stream(key(seed, run))):
                counts = np.bincount(place[batch], minlength=several * size + 1)
                one[:, :, t] = counts[:-1].reshape(several, size)
        whole = found.reshape(-1, size, self.scheme.steps)[:count]
        return whole[:, 0], whole[:, 1:]

    def play(self, count: int, seeds: tuple[int, int, int]) -> Played:
        """Draw batches in two worlds; in one of them the user's examples have no gradient."""
        silence = self.silence
        groups, steps = len(self.members.groups), self.scheme.steps
        scores, kept = [], []
        for world, seed in enumerate(seeds[1:]):
            taken, others = self.runs(count, key(seeds[0], world))
            own = noises(self.mechanism, count, seed)
            beside = noises(self.mechanism, count * groups, key(seed, 1))
            outputs = (taken * (world == 0) + own) @ self.matrix.T
            scores.append(silence.scores(outputs, others + beside.reshape(count, groups, steps)))
            kept.append((taken, own))
        return Played(taken=kept[0][0], noise=kept[1][1], inside=scores[0], outside=scores[1])

    @functools.cached_property
    def silence(self) -> Silence:
        """The score of the reader."""
        scheme = self.scheme
        assert isinstance(scheme, UserMinSep)
        return Silence.of(scheme, self.members, self.matrix, self.sigma)


def _taken(scheme: Scheme, rows: tuple[Rows, ...], seed: int) -> Array:
    """Number of each user's examples in each batch of one stream; shape (users, n)."""
    place = np.full(scheme.dataset_size, -1)
    for number, mine in enumerate(rows):
        place[mine] = number
    found = np.zeros((len(rows), scheme.steps))
    for t, batch in enumerate(scheme.stream(seed)):
        at = place[batch]
        found[:, t] = np.bincount(at[at >= 0], minlength=len(rows))
    return found


def user_coins(scheme: Scheme, mine: Rows) -> UserCoins:
    """The law of x of a user with these examples, without regard to neighbors."""
    steps = np.arange(scheme.steps)
    if isinstance(scheme, UserCyclic):
        slots = np.asarray(scheme.partition.slots)[mine]
        counts = np.bincount(slots[slots >= 0], minlength=scheme.cycle)
        chances = np.array([scheme.probability(max(1, size)) for size in scheme.partition.sizes])
        turn = steps % scheme.cycle
        return UserCoins(examples=counts[turn], probabilities=chances[turn])
    assert isinstance(scheme, UserMinSep)
    return UserCoins(
        examples=np.full(scheme.steps, len(mine)),
        probabilities=np.full(scheme.steps, scheme.probability),
        min_sep=scheme.min_sep,
        by_sampling=scheme.exclusion == "sampling",
        burn_in=scheme.burn_in,
    )


def user_game(mechanism: MatrixMechanism, user: int | None = None) -> UserGame:
    """The game about a user of the mechanism's graph.

    Args:
        mechanism: with ``UserCyclic`` or ``UserMinSep``, and the edges of its graph.
        user: its number in the graph; ``None``: one who is likely to lose most.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if there is no such user, or no game of the mechanism.
    """
    checks.instance("mechanism", mechanism, MatrixMechanism)
    scheme = audited_scheme(mechanism)
    lookup = Lookup(scheme.graph)
    if user is None:
        user = most_exposed(scheme, lookup)
    user = checks.integer("user", user, minimum=0, maximum=scheme.graph.users - 1)
    members = lookup.members(user)
    facts: dict[str, Any] = {
        "mechanism": mechanism,
        "matrix": whitening_matrix(mechanism),
        "scheme": scheme,
        "members": members,
    }
    game: UserGame
    if isinstance(scheme, UserMinSep) and scheme.min_sep > 1 and members.neighbors:
        check_states(scheme, members)
        alike = tuple(crowd(lookup, members))
        game = NeighborGame(**facts, rows=tuple(each.examples for each in alike), crowd=alike)
    else:
        if not user_coins(scheme, members.examples).examples.any():
            raise ValueError(
                f"user {user}: none of its examples is ever drawn, because all were dropped or "
                "their slots are never due; choose another user"
            )
        game = UserGame(**facts, rows=tuple(twins(scheme, lookup, user)))
    return scored(game)


def scored(game: UserGame) -> UserGame:
    """The game, marked as inexact if its scores are not the exact likelihood ratio."""
    try:
        game.likelihood()
    except NoLikelihood as reason:
        return dataclasses.replace(game, inexact=str(reason))
    return game


def audited_scheme(mechanism: MatrixMechanism) -> UserCyclic | UserMinSep:
    """The mechanism's scheme; a ``ValueError`` where there is no game of it."""
    scheme = mechanism.scheme
    name = type(scheme).__name__
    if mechanism.noise_multiplier == 0:
        raise ValueError("noise_multiplier=0: without noise there is nothing to audit")
    if isinstance(scheme, PerUser):
        raise ValueError(
            f"{name}: users take part as the examples of {type(scheme.users).__name__} do; use "
            "audit_mechanism, which audits it directly"
        )
    if scheme.unit.kind == "example":
        raise ValueError(f"{name} protects examples, not users: use audit_mechanism")
    if not isinstance(scheme, UserCyclic | UserMinSep):
        raise ValueError(
            f"{name}: each batch depends on all earlier ones, so the distribution of a user's "
            "draws cannot be computed; audit UserCyclic or UserMinSep"
        )
    if scheme.max_batch_size is not None:
        raise ValueError(
            f"{name}: max_batch_size={scheme.max_batch_size}: whether a drawn example is kept "
            "depends on all others, which the audit of one user ignores; audit it with "
            "max_batch_size=None"
        )
    return scheme


def audit_users(
    mechanism: MatrixMechanism,
    *,
    epsilon: float,
    delta: float,
    user: int | None = None,
    curve: StatedCurve | None = None,
    samples: int = 40_000,
    runs: int = 40_000,
    confidence: float = 0.99,
    seed: int = 0,
    progress: bool = True,
) -> MechanismAudit:
    """Try to refute what is stated of a mechanism that protects users who share examples.

    All examples of the audited user have the same unit gradient. Batches are those of the scheme's
    own streams on its own graph, noise is that of the strategy.

    Where others' batches do not depend on the user's coins (``UserCyclic``, ``UserMinSep`` with
    ``min_sep=1``, or a user who shares no example), the likelihood ratio is exact, and δ(ε) is
    measured in both directions (docs/theory/auditing.md#thm-user-game). Elsewhere the user's
    draws show in who is missing: the neighbors have gradients of their own, the reader sees their
    noisy sums, and runs are counted by the score of a reader who uses them. That is a lower bound
    for the mechanism as it is, whatever the score.

    Args:
        mechanism: with ``UserCyclic`` or ``UserMinSep``, the edges of its graph, and σ > 0.
        epsilon: the stated ε ≥ 0.
        delta: the stated δ in (0, 1).
        user: which user of the graph; ``None``: one who is likely to lose most.
        curve: all of δ(ε) as stated, against which counting is far stronger.
        samples: tilted runs, for δ by the likelihood ratio.
        runs: of each world, for counting.
        confidence: chance that a true statement passes, over the audit's own draws.
        seed: of all draws.
        progress: show a bar.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if one is out of range, or there is no game of the mechanism (``user_game``).
    """
    return audit_game(
        user_game(mechanism, user),
        epsilon=epsilon,
        delta=delta,
        curve=curve,
        samples=samples,
        runs=runs,
        confidence=confidence,
        seed=seed,
        progress=progress,
    )
