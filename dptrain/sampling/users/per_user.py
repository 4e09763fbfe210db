"""User-level sampling: users are drawn as examples are elsewhere, and some examples of each."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from dptrain.core import Unit, checks, did_you_mean
from dptrain.sampling import fields
from dptrain.sampling.registry import register_scheme, scheme_types
from dptrain.sampling.scheme import BatchStream, Indices, SampledRun, Scheme
from dptrain.sampling.stream import SeededStream
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.graph_edges import Offsets
from dptrain.sampling.users.user_scheme import UserScheme

_OWNER = "PerUser"
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
                f"{self._name}: the state is of step {state['step']}, but its part for the users "
                f"is of step {state[_USERS + 'step']}: resume with an undamaged state"
            )
        self._users.load_state_dict({name: state[_USERS + name] for name in known})


@register_scheme
@dataclasses.dataclass(frozen=True, kw_only=True)
class PerUser(UserScheme):
    """Users take part as the examples of another scheme do, each with up to G examples.

    This is user-level sampling (Charles et al. 2024, arXiv 2407.07737, after McMahan et al. 2018,
    arXiv 1710.06963). A step draws users; each who is drawn contributes G of their own examples,
    chosen at random anew each time (all of them, if there are no more than G). The mean of their
    gradients is clipped to norm R, *once*, so a user moves the sum of a step by R at most, whatever
    the number of their examples. Batch sizes count users: the sum is divided by the expected number
    of users. A user with few examples therefore weighs as much as one with many.

    How users take part is a scheme of its own, whose examples are the users: Poisson sampling,
    b-min-sep for correlated noise, balls in bins, ... The accountants of that scheme answer, with
    users in place of examples (docs/theory/users.md#thm-users-averaged;
    ``test_a_user_moves_the_sum_by_the_bound_at_most``).

    Every example has to belong to exactly one user: one that belonged to several would be part of
    several means, and its users would be neither disjoint nor independently drawn.

    >>> graph = AttributionGraph.from_lists([["ann"], ["bob"], ["ann"], ["eve"], ["ann"]])
    >>> scheme = PerUser.for_batch_size(graph=graph, batch_size=1.5, steps=10, group_size=2)
    >>> scheme.users
    Poisson(probability=0.5, dataset_size=3, steps=10, max_batch_size=None, nominal_size=None)
    >>> scheme.expected_batch_size, scheme.dataset_size, scheme.population
    (1.5, 5, 3)

    Args:
        graph: the user of every example; public. Drawing needs one with its edges.
        users: how users take part: a scheme of examples, with ``dataset_size`` the number of users.
        group_size: G ≥ 1, most examples that a user contributes to a step; the field holds at most
            as many as any user has.

    Raises:
        TypeError: if a field is of another type.
        ValueError: if an example has several users, or ``users`` is about another number of users,
            keeps that number private, or draws users or groups itself.
    """

    graph: AttributionGraph
    users: Scheme
    group_size: int

    def __post_init__(self) -> None:
        self._check_graph()
        fields.settle(self, integers=("group_size",))
        # Padding has room for so many rows of every user: no more than there can be.
        object.__setattr__(self, "group_size", min(self.group_size, self.graph.max_examples))
        example = "Poisson.for_batch_size(batch_size=..., dataset_size=graph.users, steps=...)"
        checks.instance("users", self.users, Scheme, example=example, owner=_OWNER)
        _check_disjoint(self.graph)
        name = type(self.users).__name__
        drawn = self.users
        if drawn.unit != Unit() or drawn.max_per_batch != 1 or drawn.participants is not drawn:
            raise ValueError(
                f"{_OWNER}: users={name} defines its own units: give a scheme that draws examples, "
                "each of which stands for a user, such as Poisson or MinSep"
            )
        if self.users.nominal_size is not None:
            raise ValueError(
                f"{_OWNER}: users.nominal_size={self.users.nominal_size} keeps the number of users "
                "private, but the attribution graph is public here: leave nominal_size out"
            )
        if self.users.dataset_size != self.graph.users:
            raise ValueError(
                f"{_OWNER}: users={name} draws from dataset_size={self.users.dataset_size}, but "
                f"the graph has {self.graph.users} users: make it with "
                f"dataset_size={self.graph.users}"
            )

    @classmethod
    def representatives(cls, run: SampledRun) -> Mapping[str, Scheme]:
        """Users who take part by Poisson sampling and by b-min-sep."""
        examples = 2 * run.dataset_size
        graph = AttributionGraph(
            examples=examples,
            users=run.dataset_size,
            edges=examples,
            max_examples=2,
            fingerprint="0" * 64,  # nobody draws from it
        )

        def of(**users: Any) -> Scheme:
            return cls.for_batch_size(
                graph=graph, batch_size=run.batch_size, steps=run.steps, group_size=2, users=users
            )

        return {
            "users=Poisson": of(type="Poisson"),
            "users=MinSep": of(type="MinSep", min_sep=run.separation),
        }

    @classmethod
    def for_batch_size(
        cls,
        *,
        graph: AttributionGraph,
        batch_size: float,
        steps: int,
        group_size: int,
        users: str | Mapping[str, Any] = "Poisson",
    ) -> Self:
        """The scheme under which batches have ``batch_size`` *users* on average.

        Args:
            graph: the user of every example.
            batch_size: B̄, users; need not be an integer.
            steps: n.
            group_size: G.
            users: how users take part: the name of a scheme, or a mapping of its ``type`` and of
                what else its ``for_batch_size`` takes, such as
                ``{"type": "MinSep", "min_sep": 8}``.

        Raises:
            TypeError: if an argument is of another type.
            ValueError: if the type is unknown, or an argument is unknown or out of range.
        """
        checks.instance("graph", graph, AttributionGraph, owner=_OWNER)
        _check_disjoint(graph)
        batch_size = checks.number("batch_size", batch_size, above=0, owner=_OWNER)
        return cls(
            graph=graph,
            users=_scheme_of(users, batch_size=batch_size, dataset_size=graph.users, steps=steps),
            group_size=group_size,
        )

    @property
    def steps(self) -> int:
        """n, of ``users``."""
        return self.users.steps

    @property
    def min_sep(self) -> int:
        """b, of ``users``."""
        return self.users.min_sep

    @property
    def period(self) -> int | None:
        """The period of ``users``."""
        return self.users.period

    @property
    def max_participations(self) -> int:
        """The participations of ``users``."""
        return self.users.max_participations

    @property
    def unit(self) -> Unit:
        """A user, whatever the number of their examples."""
        return Unit(kind="user", max_examples=None)

    @property
    def participants(self) -> Scheme:
        """``users``: each adds one clipped mean to a step that it takes part in."""
        return self.users

    @property
    def rate(self) -> float:
        """A user's chance to take part in one step."""
        return self.users.rate

    @property
    def expected_batch_size(self) -> float:
        """B̄: the expected number of users, which the sum is divided by."""
        return self.users.expected_batch_size

    @property
    def physical_batch_size(self) -> int | None:
        """Room for G examples of every user, where ``users`` pads its batches."""
        units = self.users.physical_batch_size
        return None if units is None else units * self.group_size

    def shortfall(self, seed: int) -> str | None:
        """The shortfall of ``users`` with this seed."""
        return self.users.shortfall(seed)

    def grouped(self, batch: Indices) -> tuple[Indices, Indices]:
        """The examples user by user, ascending, and how many each has."""
        owners = self.graph.members[batch]  # one user an example: they lie as the examples do
        order = np.argsort(owners, kind="stable")
        _, sizes = np.unique(owners, return_counts=True)
        return batch[order], sizes.astype(np.int64)

    def stream(self, seed: int) -> PerUserStream:
        """Batches in O(examples of the users drawn) work a step; 8 bytes an example and user.

        Raises:
            ValueError: if the graph holds no edges, as one read from a file; ``attach`` it first.
        """
        return PerUserStream(
            self, self.users.stream(seed), self._own_examples, self.group_size, seed
        )

    @functools.cached_property
    def _own_examples(self) -> OwnExamples:
        return OwnExamples(*self.graph.by_user())


def _check_disjoint(graph: AttributionGraph) -> None:
    """Refuse graphs with examples of several users."""
    if not graph.is_disjoint:
        raise ValueError(
            f"{_OWNER}: graph: its {graph.examples} examples have {graph.edges} users in total, "
            "but a mean over a user's examples requires that every example has exactly one user. "
            "Use UserCyclic or UserMinSep, which clip every example separately and allow shared "
            "examples"
        )


def _scheme_of(users: Any, **known: Any) -> Scheme:
    """The scheme of so many users, as its ``for_batch_size`` makes it."""
    stated = {"type": users} if isinstance(users, str) else users
    if not isinstance(stated, Mapping):
        raise TypeError(
            f"{checks.named('users', users, _OWNER)} must be the name of a scheme, or a mapping of "
            "its type and its other arguments, e.g. {'type': 'MinSep', 'min_sep': 8}"
        )
    name, types = stated.get("type"), scheme_types()
    if not isinstance(name, str) or name not in types:
        hint = did_you_mean(str(name), types)
        raise ValueError(f"{_OWNER}: users.type={name!r}: {hint}choose one of {', '.join(types)}")
    make: Any = types[name].for_batch_size  # type: ignore[attr-defined]  # every registered one has
    parameters = inspect.signature(make).parameters
    if "graph" in parameters:
        raise ValueError(
            f"{_OWNER}: users.type={name} draws the examples of users itself: choose a scheme that "
            "draws examples, each of which stands for a user, such as Poisson or MinSep"
        )
    own = {key: value for key, value in stated.items() if key != "type"}
    if wrong := sorted(set(own) & {*known, "epochs"} | set(own) - set(parameters)):
        free = [each for each in parameters if each not in (*known, "epochs")]
        raise ValueError(
            f"{_OWNER}: users.{wrong[0]}={own[wrong[0]]!r}: of {name}, set only {free}; the batch "
            "size, the users and the steps are those of the run"
        )
    steps = known.pop("steps")
    if parameters["batch_size"].annotation in ("int", int):
        known["batch_size"] = round(known["batch_size"])
    try:
        if "epochs" not in parameters:
            return make(**known, **own, steps=steps)
        epoch = make(**known, **own, epochs=1).steps
        epochs = fields.whole_epochs(_OWNER, epoch, epochs=None, steps=steps)
        return make(**known, **own, epochs=epochs)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ValueError(f"{_OWNER}: users: {error}") from error
