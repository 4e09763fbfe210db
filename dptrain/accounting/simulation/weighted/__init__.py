"""Certificates from weighted samples."""
