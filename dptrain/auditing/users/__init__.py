"""Audits with users as canaries, on the public graph that says who belongs to which example."""

from dptrain.auditing.users.audit import audit_users
from dptrain.auditing.users.canaries import UserCanaryRun, run_user_canaries
from dptrain.auditing.users.game import NeighborGame, UserGame, user_game

__all__ = [
    "NeighborGame",
    "UserCanaryRun",
    "UserGame",
    "audit_users",
    "run_user_canaries",
    "user_game",
]
