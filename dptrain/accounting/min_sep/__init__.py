"""Accountants of b-min-sep sampling."""

from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.min_sep.law import MinSepLaw
from dptrain.accounting.min_sep.losses import MinSepLosses
from dptrain.accounting.min_sep.monte_carlo import MinSepMonteCarlo

__all__ = ["MinSepImportance", "MinSepLaw", "MinSepLosses", "MinSepMonteCarlo"]
