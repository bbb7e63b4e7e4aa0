"""What this machine can run, and whether what it computes is right: `python -m espalier doctor`."""
