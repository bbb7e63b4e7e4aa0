"""Benchmarks of the harness itself: commands that measure and write pages."""
