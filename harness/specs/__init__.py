"""Plain data: what a run, a benchmark and a method's settings are. Nothing here needs torch."""
