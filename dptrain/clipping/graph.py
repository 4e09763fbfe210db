"""Where parameters enter the autograd graph."""

from __future__ import annotations

from typing import Any


def parameter_uses(root: Any, stop: set[Any] = frozenset()) -> list[tuple[Any, Any]]:  # type: ignore[assignment]
    """Edges (node, leaf node) of the autograd graph below ``root`` that end in a leaf.

    Args:
        root: a ``grad_fn``, or ``None``.
        stop: nodes that are not entered.
    """
    found, seen, todo = [], set(stop), [root]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if hasattr(following, "variable"):
                found.append((node, following))
            else:
                todo.append(following)
    return found
