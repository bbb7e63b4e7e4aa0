"""`evaluate`, and lists of what it takes: the commands of `python -m espalier` as Python functions."""
