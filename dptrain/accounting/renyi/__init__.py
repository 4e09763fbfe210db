"""Rényi divergences and their conversion to (ε, δ)."""
