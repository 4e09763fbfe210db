"""User-level b-min-sep sampling where an example may belong to several users."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from dptrain.core import checks
from dptrain.sampling import fields
from dptrain.sampling.registry import register_scheme
from dptrain.sampling.scheme import Indices, SampledRun, Scheme
from dptrain.sampling.schemes.drawing import successes
from dptrain.sampling.stream import SeededStream, to_array, to_tensor
from dptrain.sampling.users.batch_size import Method, probability_for_batch_size
from dptrain.sampling.users.exclusion import Exclusion, RecentUsers, checked, default_burn_in
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.user_scheme import UserScheme, own_examples, shared_examples

_MOST_STEPS = 2**31 - 1


@register_scheme
@dataclasses.dataclass(frozen=True, kw_only=True)
class UserMinSep(UserScheme):
    """Every example tosses a coin at every step; those close to a recent one are left out.

    This is multi-attribution b-min-sep sampling (Dong & Ganesh 2026, arXiv 2602.09338, Algorithm
    3). Step t samples S_t, each example with probability p, independently of all else. The batch is
    S_t without every example that shares a user with an example of S_{t-b+1}, …, S_{t-1}, *whether
    that one was used or not*. A user takes part at most once in any b consecutive steps, with up to
    k examples at once.

    ``exclusion="participation"`` is Algorithm 4 there: only examples that were used leave others
    out. It wastes fewer samples; the authors' claim about its privacy is a conjecture (6.2).

    Whether a user's examples were sampled shows in who else is left out. Where examples are shared,
    Theorem 6.1 of that paper's first version is therefore false
    (docs/theory/users.md#thm-users-attack; ``test_attack_beats_the_theorem_and_not_the_claim``).
    What the accountants here state holds on any graph, for either rule
    (docs/theory/users.md#thm-users-revealed and docs/theory/users.md#thm-users-blocking).

    The run begins after ``burn_in`` steps that are drawn and not used for training. Under
    ``"sampling"``, b-1 such steps reach the stationary regime exactly: more change nothing, and 0
    is a cold start (docs/theory/sampling.md#thm-user-burn-in). Under ``"participation"`` it is only
    approached, in waves of period b that fade the slower the larger b·p is: the default of 10b
    steps is ample up to b·p = 1 and should be raised beyond.

    Args:
        graph: the users of every example; public. Drawing needs one with its edges.
        probability: p in (0, 1], the chance of an example to be sampled in a step.
        min_sep: b ≥ 1.
        steps: n ≥ 1.
        batch_size: B̄ in (0, N], the public constant that sums are divided by; the expected number
            of examples in a batch. ``for_batch_size`` finds the p that belongs to it.
        exclusion: ``"sampling"`` or ``"participation"``.
        burn_in: steps before the first, ≥ 0; b-1 or 10b (see above) if left out.

    Raises:
        ValueError: if a field is of another type or out of range.
    """

    graph: AttributionGraph
    probability: float
    min_sep: int
    steps: int
    batch_size: float
    exclusion: Exclusion = "sampling"
    burn_in: int = None  # type: ignore[assignment]  # None becomes the default, an int

    def __post_init__(self) -> None:
        owner = "UserMinSep"
        self._check_graph()
        size = fields.expected_batch_size(
            owner,
            self.batch_size,
            largest=self.graph.examples,
            why=f"the graph has {self.graph.examples} examples",
        )
        checked(owner, self.exclusion)
        object.__setattr__(self, "batch_size", size)
        fields.settle(self, integers=("min_sep", "steps"), probabilities=("probability",))
        burn_in = self.burn_in
        if burn_in is None:
            burn_in = default_burn_in(self.min_sep, self.exclusion)
        burn_in = checks.integer("burn_in", burn_in, minimum=0, owner=owner)
        object.__setattr__(self, "burn_in", burn_in)
        # A user's last step is kept in 32 bits.
        if burn_in + self.steps > _MOST_STEPS or self.min_sep > _MOST_STEPS:
            raise ValueError(
                f"{owner}: min_sep={self.min_sep} and burn_in={burn_in} with steps={self.steps} "
                f"are more than {_MOST_STEPS} steps: min_sep=steps already limits every user to "
                "one batch, and burn_in=0 starts at once"
            )

    @classmethod
    def representatives(cls, run: SampledRun) -> Mapping[str, Scheme]:
        """Users with examples of their own, and users who share theirs, under either rule."""

        def of(
            graph: AttributionGraph, exclusion: Exclusion = "sampling", min_sep: int | None = None
        ) -> Scheme:
            return cls(
                graph=graph,
                probability=1.0 / run.epoch_length,
                min_sep=run.separation if min_sep is None else min_sep,
                steps=run.steps,
                batch_size=run.batch_size,
                exclusion=exclusion,
            )

        shared = shared_examples(run.dataset_size)
        return {
            "users share no example": of(own_examples(run.dataset_size)),
            "shared examples": of(shared),
            "exclusion='participation'": of(shared, "participation"),
            "min_sep=1": of(shared, min_sep=1),
        }

    @classmethod
    def for_batch_size(
        cls,
        *,
        graph: AttributionGraph,
        batch_size: float,
        min_sep: int,
        steps: int,
        exclusion: Exclusion = "sampling",
        burn_in: int | None = None,
        method: Method | None = None,
        seed: int = 0,
    ) -> Self:
        """The scheme with the smallest p at which batches have ``batch_size`` examples on average.

        Args:
            graph, min_sep, steps, exclusion, burn_in: as for the scheme itself.
            batch_size: B̄ > 0.
            method: how p is found, ``"exact"`` or ``"simulation"``; ``None``: exact where that
                is possible.
            seed: of the simulation; public.

        Raises:
            ValueError: if exclusion allows no such batches; the message gives the largest.
        """
        p = probability_for_batch_size(
            graph,
            batch_size=batch_size,
            min_sep=min_sep,
            exclusion=exclusion,
            method=method,
            seed=seed,
        )
        return cls(
            graph=graph,
            probability=p,
            min_sep=min_sep,
            steps=steps,
            batch_size=batch_size,
            exclusion=exclusion,
            burn_in=burn_in,  # type: ignore[arg-type]
        )

    @property
    def unamplified(self) -> bool:  # type: ignore[override]
        """Beside accountants that use only part of the randomness: where somebody is left out."""
        return self.min_sep > 1

    @property
    def max_per_batch(self) -> int:
        """k: all examples of a user may be sampled together."""
        return self.graph.max_examples

    @property
    def expected_batch_size(self) -> float:
        """B̄ as it was given."""
        return self.batch_size

    def stream(self, seed: int) -> UserMinSepStream:
        """Batches in O(p·N·users per example) work a step; 4 bytes a user.

        Raises:
            ValueError: if the graph holds no edges, as one read from a file; ``attach`` it first.
        """
        return UserMinSepStream(self, seed)


class UserMinSepStream(SeededStream):
    """Batches of ``UserMinSep``; the steps of the burn-in are drawn at once."""

    def __init__(self, scheme: UserMinSep, seed: int) -> None:
        super().__init__(scheme, seed)
        self._scheme = scheme
        self._recent = RecentUsers(
            scheme.graph, scheme.min_sep, scheme.exclusion, start=-scheme.burn_in
        )
        for step in tqdm(range(-scheme.burn_in, 0), desc="burn-in", unit="step", delay=2):
            self._recent.admit(step, self._sample())

    def _sample(self) -> Indices:
        """S_t: a coin for every example."""
        return successes(self._rng, self._scheme.dataset_size, self._scheme.probability)

    def _draw(self) -> Indices:
        return self._recent.admit(self.step, self._sample())

    def _own_state(self) -> dict[str, Any]:
        return {"last_touched": to_tensor(self._recent.last)}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self._recent.last = to_array(state["last_touched"], np.int32, self._scheme.population)
