"""`evaluate`, and lists of its choices: the commands of `python -m espalier` as Python functions."""
