"""Audits with users as canaries, on the public graph that says who belongs to which example."""

from dptrain.auditing.users.canaries import UserCanaryRun, run_user_canaries
from dptrain.auditing.users.game import NeighborGame, UserGame, audit_users, user_game

__all__ = [
    "NeighborGame",
    "UserCanaryRun",
    "UserGame",
    "audit_users",
    "run_user_canaries",
    "user_game",
]
