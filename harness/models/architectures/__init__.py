"""What families are made of: kinds of vision tower, architectures that transformers lacks, formats of releases."""
