"""Rules: what the gradients of a layer are made of."""

from dptrain.clipping.bookkeeping.rules.layers import register_imported
from dptrain.clipping.bookkeeping.rules.rule import owned
from dptrain.clipping.bookkeeping.rules.table import RULES, rule_of, without_rule

__all__ = ["RULES", "owned", "register_imported", "rule_of", "without_rule"]
