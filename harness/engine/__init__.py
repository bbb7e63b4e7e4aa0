"""The only code that touches a model's internals: sessions, probes, masks, positions, exact dropping."""
