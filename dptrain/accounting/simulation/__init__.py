"""Accountants that simulate, and the certificates they leave."""
