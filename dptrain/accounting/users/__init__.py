"""Accountants of user-level sampling."""

from dptrain.accounting.users.hidden_draws import UserPoissonPLD
from dptrain.accounting.users.importance import UserMinSepImportance
from dptrain.accounting.users.neighbors import neighbor_facts
from dptrain.accounting.users.revealed import RevealedDraws

__all__ = [
    "RevealedDraws",
    "UserMinSepImportance",
    "UserPoissonPLD",
    "neighbor_facts",
]
