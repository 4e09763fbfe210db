"""Accuracy at equal privacy on real data: contests of methods, run by run, and what came out."""
