"""Accountants: what a mechanism guarantees, and how much noise a guarantee takes."""

from dptrain.accounting.accountant import Accountant, Availability, Cost, Profile
from dptrain.accounting.calibrate import Calibration, calibrate
from dptrain.accounting.dispatch import account, accountants_for, profile

__all__ = [
    "Accountant",
    "Availability",
    "Calibration",
    "Cost",
    "Profile",
    "account",
    "accountants_for",
    "calibrate",
    "profile",
]
