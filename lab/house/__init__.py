"""Figures about the code base itself."""
