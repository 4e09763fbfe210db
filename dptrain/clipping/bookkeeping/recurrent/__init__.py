"""Recurrences over a batch of sequences, with the gradients of their gates."""
