"""How far a sweep is, read from its store alone."""
