"""Commands about several runs on the same people's data."""
