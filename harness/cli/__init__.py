"""The commands of `python -m espalier`, one module each."""
