"""The base of schemes that protect users: the graph that says who belongs to what."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC
from typing import Self

from dptrain.core import Unit, checks
from dptrain.sampling.scheme import Scheme
from dptrain.sampling.users.graph import AttributionGraph


def own_examples(examples: int) -> AttributionGraph:
    """Users with two examples of their own, for the support table: nobody draws from it."""
    return AttributionGraph(
        examples=examples, users=examples // 2, edges=examples, max_examples=2, fingerprint="0" * 64
    )


@functools.cache
def shared_examples(examples: int) -> AttributionGraph:
    """A graph in which every example has two users and every user four examples."""
    users = examples // 2
    return AttributionGraph.from_lists(
        [(e // 2 % users, (e // 2 + 1) % users) for e in range(examples)]
    )


class UserScheme(Scheme, ABC):
    """A scheme whose protected unit is a user of a public attribution graph.

    Subclasses are dataclasses with a field ``graph``, and call ``_check_graph`` first.
    """

    graph: AttributionGraph

    def _check_graph(self) -> None:
        checks.instance("graph", self.graph, AttributionGraph, owner=type(self).__name__)

    @property
    def dataset_size(self) -> int:
        """N: the examples of the graph."""
        return self.graph.examples

    @property
    def population(self) -> int:
        """Number of users."""
        return self.graph.users

    @property
    def unit(self) -> Unit:
        """A user with at most as many examples as the graph gives any."""
        return Unit(kind="user", max_examples=self.graph.max_examples)

    @property
    def rate(self) -> float:
        """B̄/N, an example's average chance to be used in one step."""
        return self.expected_batch_size / self.graph.examples

    def attach(self, graph: AttributionGraph) -> Self:
        """This scheme with the edges of ``graph``, which a scheme read from a file lacks.

        Raises:
            ValueError: if it is another graph.
        """
        return dataclasses.replace(self, graph=self.graph.attach(graph))  # type: ignore[type-var]
