"""Published tables, as data with provenance, and what can be held against them."""
