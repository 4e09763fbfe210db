"""Moments E_Q[(P/Q)^α] of b-min-sep sampling, bands ≤ b, at the size of production."""

from dptrain.accounting.min_sep.moments.program import (
    LARGEST_ORDER,
    NO_WORK,
    Affordable,
    affordable,
    bounded_by,
    foreseen,
    least_work,
    log_large_moment,
    log_moment,
    most_copies,
    rough_large_moments,
    settles,
)

__all__ = [
    "LARGEST_ORDER",
    "NO_WORK",
    "Affordable",
    "affordable",
    "bounded_by",
    "foreseen",
    "least_work",
    "log_large_moment",
    "log_moment",
    "most_copies",
    "rough_large_moments",
    "settles",
]
