"""Generated clips with events in time, questions about them, and scores of answers."""
