"""Cells of a sweep as jobs: what runs where, with how much of a machine, and what a sweep would cost."""
