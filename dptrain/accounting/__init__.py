"""Accountants: what a mechanism guarantees, and how much noise a guarantee takes."""

from dptrain.accounting.base.accountant import Accountant, Availability, Cost, Profile
from dptrain.accounting.calibration import Calibration, calibrate
from dptrain.accounting.dispatch import (
    ACCOUNTANTS,
    account,
    accountants_for,
    find_accountants,
    profile,
)
from dptrain.accounting.dp_event import to_dp_event
from dptrain.accounting.poisson.groups import group_curve, last_iterate_curve
from dptrain.accounting.unamplified import UnsampledGaussian

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Availability",
    "Calibration",
    "Cost",
    "Profile",
    "UnsampledGaussian",
    "account",
    "accountants_for",
    "calibrate",
    "find_accountants",
    "group_curve",
    "last_iterate_curve",
    "profile",
    "to_dp_event",
]
