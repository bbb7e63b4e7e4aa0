"""Rehearsals: a run of the product's own engine on simulated cards, without weights and without memory for them."""
