"""Moments E_Q[(P/Q)^α] of b-min-sep sampling, bands ≤ b, at the size of production."""

from dptrain.accounting.min_sep.moments.program import (
    Affordable,
    affordable,
    bounded_by,
    log_moment,
    settles,
)

__all__ = ["Affordable", "affordable", "bounded_by", "log_moment", "settles"]
