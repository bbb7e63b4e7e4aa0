"""Loadable checkpoints from releases in a format of their own: one command a release."""
