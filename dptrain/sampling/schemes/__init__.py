"""Sampling schemes of examples, each with its stream of batches."""
