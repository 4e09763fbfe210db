"""Layers without a rule, operation by operation."""

from dptrain.clipping.bookkeeping.operations.followed import OperationsRule, adapter_rule
from dptrain.clipping.bookkeeping.rules.table import FINDERS

__all__ = ["OperationsRule"]

FINDERS.append(adapter_rule)
