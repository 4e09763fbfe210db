"""Owner maps, which say whose every number is, followed from operator to operator."""

from dptrain.clipping.owners.answers import Answers, Telling, Told
from dptrain.clipping.owners.looks import look_of_call
from dptrain.clipping.owners.maps import SHARED
from dptrain.clipping.owners.trace import Event, OwnerTrace
from dptrain.clipping.owners.watch import SHARE, Findings, OwnerWatch, RowsMeet

__all__ = [
    "SHARE",
    "SHARED",
    "Answers",
    "Event",
    "Findings",
    "OwnerTrace",
    "OwnerWatch",
    "RowsMeet",
    "Telling",
    "Told",
    "look_of_call",
]
