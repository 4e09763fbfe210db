"""Certificates from weighted samples."""

from dptrain.accounting.simulation.weighted.accountant import WeightedAccountant

__all__ = ["WeightedAccountant"]
