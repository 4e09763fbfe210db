"""Rényi divergences and their conversion to (ε, δ)."""

from dptrain.accounting.renyi.banded_program import banded_log_sums
from dptrain.accounting.renyi.conversion import (
    conversion_term,
    epsilon_at_order,
    largest_divergence,
)
from dptrain.accounting.renyi.gram import gram_matrix
from dptrain.accounting.renyi.log_sums import independent_log_sums
from dptrain.accounting.renyi.sampled_step import LARGEST_ORDER, step_divergence

__all__ = [
    "LARGEST_ORDER",
    "banded_log_sums",
    "conversion_term",
    "epsilon_at_order",
    "gram_matrix",
    "independent_log_sums",
    "largest_divergence",
    "step_divergence",
]
