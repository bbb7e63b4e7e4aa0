"""Cells of a sweep as jobs: placement, resources, and the estimated cost of a sweep."""
