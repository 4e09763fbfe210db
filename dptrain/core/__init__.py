"""What every room stands on: guarantees as values, checks of arguments, JSON, random seeds."""
