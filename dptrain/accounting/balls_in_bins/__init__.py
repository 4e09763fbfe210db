"""Accountants of balls-in-bins sampling and random allocation."""
