"""Correlated noise step by step: one stream for each form of strategy."""
