"""Accuracy-retention curves, and every method against random: what is still answered right as visual tokens go."""
