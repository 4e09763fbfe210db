"""Accountants: what a mechanism guarantees, and how much noise a guarantee takes."""

from dptrain.accounting.base.accountant import Accountant, Availability, Cost, Profile
from dptrain.accounting.calibration import Calibration, calibrate
from dptrain.accounting.dispatch import account, accountants_for, profile
from dptrain.accounting.dp_event import to_dp_event
from dptrain.accounting.poisson.groups import group_curve, last_iterate_curve

__all__ = [
    "Accountant",
    "Availability",
    "Calibration",
    "Cost",
    "Profile",
    "account",
    "accountants_for",
    "calibrate",
    "group_curve",
    "last_iterate_curve",
    "profile",
    "to_dp_event",
]
