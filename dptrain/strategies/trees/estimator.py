"""The online estimator of prefix sums from noisy trees, and its error (Honaker 2015).

Let y = C x + z be the noisy node sums, z of unit variance. The estimate of a leaf is its own y; the
estimate e_k of a node of level k is

    e_k = v_k y_k + (1 - v_k) (e_left + e_right),    v_0 = 1,    1/v_k = 1 + 1/(2 v_{k-1}),

and v_k is its variance. A prefix sum is estimated by adding the estimates of the maximal complete
nodes of the prefix. Everything up to step t is used for prefix t and nothing later ("estimation
from below" in Kairouz et al. 2021, arXiv 2103.00039, so that it works online).

It is unbiased, and for every prefix by itself has the least variance of all unbiased linear
estimators from the nodes that are complete by then; v_k = 1/(2 (1 - 2^{-(k+1)}))
(docs/theory/strategies.md#thm-tree-estimator;
``test_least_variance_for_every_prefix_from_all_nodes_complete_by_then``).
"""

from __future__ import annotations

import numpy as np

from dptrain.core import Array
from dptrain.strategies.trees.nodes import node_rows, pair_sums


def node_variance(level: int) -> float:
    """v_k, the variance of the estimate of a node and the weight of the node itself in it."""
    return 1.0 / (2.0 - 2.0**-level)


def online_noise(z: Array, steps: int, height: int) -> Array:
    """W z: the increments of the estimates of the prefix sums, for z of a row per node.

    Step t completes one maximal node, of level k, and takes over the estimates of the k maximal
    nodes to its left. Level by level from the leaves, its estimate is
    e_l = s_l + v_l (z_l - s_l) with s_l = e_left + e_right, so the increment of the prefix's
    estimate is z_0 + Σ_{l=1}^k v_l (z_l - s_l): nothing is summed up over t.

    Args:
        z: shape (rows,) or (rows, k).
        steps: n.
        height: levels of a tree.

    Returns:
        Shape (n,) or (n, k).
    """
    estimate = noise = z[node_rows(steps, 0, height)]  # a copy
    for level in range(1, height):
        sums = pair_sums(estimate)
        correction = node_variance(level) * (z[node_rows(steps, level, height)] - sums)
        noise[(1 << level) - 1 :: 1 << level] += correction
        estimate = sums + correction
    return noise


def prefix_variances(steps: int, height: int) -> Array:
    """Variance of the estimate of every prefix sum, shape (steps,).

    The maximal nodes of m steps are m >> (h-1) roots and a node for each lower bit of m.
    """
    m = np.arange(1, steps + 1)
    variance: Array = np.asarray(m >> (height - 1), dtype=np.float64) * node_variance(height - 1)
    for level in range(height - 1):
        variance += ((m >> level) & 1) * node_variance(level)
    return variance


def mean_variance(steps: int, height: int) -> float:
    """Mean of ``prefix_variances`` by counting bits: O(height)."""
    root = height - 1
    trees, rest = steps >> root, steps & ((1 << root) - 1)
    total = node_variance(root) * ((trees * (trees - 1) // 2 << root) + trees * (rest + 1))
    for level in range(root):
        # Of 0, …, n the numbers with the bit set: 2^l in every whole turn of 2^{l+1} of them.
        turns, last = divmod(steps + 1, 2 << level)
        total += node_variance(level) * ((turns << level) + max(0, last - (1 << level)))
    return total / steps


def greatest_variance(steps: int, height: int) -> float:
    """Maximum of ``prefix_variances``: O(height²).

    Every node adds variance. Of the m ≤ n with as many roots as n, the worst is n itself, or it
    agrees with n down to some set bit, lacks that one and has all lower ones. Of those with fewer
    roots, the worst has one root less and all lower bits.
    """
    root = height - 1
    whole, rest = steps >> root, steps & ((1 << root) - 1)
    candidates = [rest] + [
        (rest >> (level + 1) << (level + 1)) + (1 << level) - 1
        for level in range(root)
        if rest >> level & 1
    ]
    found = [(whole, low) for low in candidates]
    if whole:
        found.append((whole - 1, (1 << root) - 1))
    return max(
        trees * node_variance(root)
        + sum(node_variance(level) for level in range(root) if low >> level & 1)
        for trees, low in found
    )
