"""Checks that refuse a run before its model is loaded."""
