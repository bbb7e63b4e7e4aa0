"""New tokens through one model's text stack: cache, attention, recorded steps."""
