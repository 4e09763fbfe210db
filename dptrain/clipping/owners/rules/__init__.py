"""Owners of the results of torch's operators: a rule for each."""

from dptrain.clipping.owners.rules import (
    along,
    by_rows,
    channels,
    elementwise,
    indices,
    loss_operators,
    products,
    views,
)
from dptrain.clipping.owners.rules.calls import Call
from dptrain.clipping.owners.rules.results import owners_of_results

KINDS = along, by_rows, channels, elementwise, indices, loss_operators, products, views
"""Modules of the rules, which are registered as these are imported."""

__all__ = ["KINDS", "Call", "owners_of_results"]
