"""The base of every accountant: its interface, its curves, and how it states a guarantee."""

from dptrain.accounting.base.accountant import Cost, size_refusal, truncation_refusal
from dptrain.accounting.base.curve import Curve, DeterministicAccountant, convex_envelope
from dptrain.accounting.base.statement import (
    AVERAGED,
    PUBLIC_GRAPH,
    SETTINGS_ARE_PUBLIC,
    SMALLEST_DELTA,
    check_delta,
    check_epsilon,
    checked_sigma,
    told_once,
)
from dptrain.accounting.base.trade_off import WEAKEST, TradeOff, check_same_subject

__all__ = [
    "AVERAGED",
    "PUBLIC_GRAPH",
    "SETTINGS_ARE_PUBLIC",
    "SMALLEST_DELTA",
    "WEAKEST",
    "Cost",
    "Curve",
    "DeterministicAccountant",
    "TradeOff",
    "check_delta",
    "check_epsilon",
    "check_same_subject",
    "checked_sigma",
    "convex_envelope",
    "size_refusal",
    "told_once",
    "truncation_refusal",
]
