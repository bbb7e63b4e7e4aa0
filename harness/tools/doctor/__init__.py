"""Checks of this machine and of its results: `python -m espalier doctor`."""
