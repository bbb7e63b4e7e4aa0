"""Loadable checkpoints from releases in other formats: one command a release."""
