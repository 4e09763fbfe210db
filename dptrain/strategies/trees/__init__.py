"""Tree aggregation as a strategy."""
