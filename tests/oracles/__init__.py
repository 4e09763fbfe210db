"""Slow, plain oracles written from the theorems alone, and the tests that hold the code to them."""
