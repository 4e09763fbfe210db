"""Accountants of b-min-sep sampling."""
