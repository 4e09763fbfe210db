"""Conditional composition of matrix mechanisms (Choquette-Choo et al. 2024)."""

from dptrain.accounting.mmcc.mmcc import MMCC

__all__ = ["MMCC"]
