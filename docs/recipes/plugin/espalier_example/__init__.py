"""A method and a benchmark for Espalier."""
