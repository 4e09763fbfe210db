"""A note of the statement about the examples and users that contribution bounding left out."""

from __future__ import annotations

import numpy as np

from dptrain.sampling import BoundedGraph


def bounding_note(bounded: BoundedGraph) -> str:
    """Numbers of examples and users that were kept and dropped, in a sentence.

    A scheme knows the examples it draws from and not those that were dropped beforehand:
    ``private.guarantee().with_notes(bounding_note(bounded))``. The numbers are the public graph's.
    """
    source, graph = bounded.source, bounded.graph
    kept = len(np.unique(bounded.rows))
    copies = graph.examples - kept
    examples, gone = source.examples - kept, source.users - graph.users
    text = (
        f"{kept:,} of {source.examples:,} examples were kept so that no user has more than "
        f"{bounded.k}"
    )
    if copies:
        text += f", and {copies:,} copies of them added"
    if examples:
        text += f"; the other {examples:,} {'was' if examples == 1 else 'were'} not trained on"
    if gone:
        text += f", and with them all that {gone:,} of {source.users:,} users had"
    return text
