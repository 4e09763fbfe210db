"""Layers without a rule, operation by operation."""

from dptrain.clipping.bookkeeping.operations.adapters import adapter_rule
from dptrain.clipping.bookkeeping.operations.operation import Unhandled
from dptrain.clipping.bookkeeping.operations.plan import RowPlan
from dptrain.clipping.bookkeeping.operations.rule import OperationsRule
from dptrain.clipping.bookkeeping.operations.tracked import Tracked
from dptrain.clipping.bookkeeping.rules.rules import FINDERS

__all__ = ["OperationsRule", "RowPlan", "Tracked", "Unhandled"]

FINDERS.append(adapter_rule)
