"""Audits with users as canaries, on the public graph that says who belongs to which example."""

from dptrain.auditing.users.audit import UserAudit, audit_users
from dptrain.auditing.users.game import NeighborGame, UserGame, user_game

__all__ = ["NeighborGame", "UserAudit", "UserGame", "audit_users", "user_game"]
