"""What families with the same kind of vision tower do alike: units, items, and places on a picture."""
