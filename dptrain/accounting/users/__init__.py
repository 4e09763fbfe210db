"""Accountants of user-level sampling."""

from dptrain.accounting.users.disjoint import UserMinSepMonteCarlo
from dptrain.accounting.users.exposed import ExposedSteps
from dptrain.accounting.users.hidden_draws import UserPoissonPLD
from dptrain.accounting.users.importance import ExposedStepsImportance, UserMinSepImportance
from dptrain.accounting.users.neighbors import neighbor_facts
from dptrain.accounting.users.revealed import RevealedDraws

__all__ = [
    "ExposedSteps",
    "ExposedStepsImportance",
    "RevealedDraws",
    "UserMinSepImportance",
    "UserMinSepMonteCarlo",
    "UserPoissonPLD",
    "neighbor_facts",
]
