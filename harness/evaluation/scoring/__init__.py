"""Scorers of benchmarks that lmms-eval lacks: pure functions of an answer and its reference."""
