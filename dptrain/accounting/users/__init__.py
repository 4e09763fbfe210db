"""Accountants of user-level sampling."""
