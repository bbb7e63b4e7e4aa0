"""Accuracy-retention curves, and every method against random: scores as visual tokens are removed."""
