"""Fixtures of several recipe tests."""

from tests.recipes.individual_runs import empty_config

__all__ = ["empty_config"]
