"""Hostile input for everything that reads bytes from elsewhere; `fuzz/run.py` runs it."""
