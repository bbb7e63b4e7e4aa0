"""Published tables as data with provenance, and their comparison with measured results."""
