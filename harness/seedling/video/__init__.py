"""Generated clips with events in time, what is asked about them, and how answers are scored."""
