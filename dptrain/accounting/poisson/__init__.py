"""Accountants of Poisson sampling, plain, truncated and cyclic."""
