"""Kinds of method: how a run uses a method. One file a kind, one protocol, one table."""
