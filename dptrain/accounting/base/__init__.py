"""What every accountant is: its interface, its curves, and how it states a guarantee."""

from dptrain.accounting.base.curve import Curve, DeterministicAccountant, convex_envelope
from dptrain.accounting.base.statement import (
    AVERAGED,
    PUBLIC_GRAPH,
    SMALLEST_DELTA,
    check_delta,
    check_epsilon,
    checked_sigma,
    told_once,
)
from dptrain.accounting.base.units import bare, of_participants

__all__ = [
    "AVERAGED",
    "PUBLIC_GRAPH",
    "SMALLEST_DELTA",
    "Curve",
    "DeterministicAccountant",
    "bare",
    "check_delta",
    "check_epsilon",
    "checked_sigma",
    "convex_envelope",
    "of_participants",
    "told_once",
]
