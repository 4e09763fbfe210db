"""Whose every number is: owner maps, followed from operator to operator."""

from dptrain.clipping.owners.maps import SHARED
from dptrain.clipping.owners.trace import Event, OwnerTrace

__all__ = ["SHARED", "Event", "OwnerTrace"]
