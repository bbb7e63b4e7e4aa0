"""Lossless speculative decoding: one state machine, and the parts that it runs."""
