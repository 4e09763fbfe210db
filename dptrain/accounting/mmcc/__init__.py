"""Conditional composition of matrix mechanisms (Choquette-Choo et al. 2024)."""
