"""Lossless speculative decoding: one state machine, and what it is run with."""
