"""Accountants: what a mechanism guarantees, and how much noise a guarantee takes."""

from dptrain.accounting.accountant import Accountant, Availability, Cost, Profile
from dptrain.accounting.calibrate import Calibration, calibrate
from dptrain.accounting.dispatch import account, accountants_for, profile
from dptrain.accounting.dp_event import to_dp_event
from dptrain.accounting.group_privacy import group_curve, last_iterate_curve

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
