"""Schemes and strategies as a configuration file writes them: ``type``, and its fields."""
