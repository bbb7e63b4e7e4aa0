"""Signals that methods read beyond the tokens: one producer for each signal or family, listed in `table.py`."""
