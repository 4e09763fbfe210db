"""Accountants of user-level sampling."""

from dptrain.accounting.users.disjoint import UserMinSepMonteCarlo
from dptrain.accounting.users.exposed import ExposedSteps
from dptrain.accounting.users.neighbors import neighbor_facts
from dptrain.accounting.users.revealed import RevealedDraws

__all__ = ["ExposedSteps", "RevealedDraws", "UserMinSepMonteCarlo", "neighbor_facts"]
