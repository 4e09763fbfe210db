"""Data readers of the recipes."""

from recipes.data.digits import Split, digits

__all__ = ["Split", "digits"]
