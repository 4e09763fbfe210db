"""Tensors that all examples share, and how they are told from those with a row for each."""
