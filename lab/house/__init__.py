"""Figures of the code base: sizes, names, import chains, and the path of one run."""
