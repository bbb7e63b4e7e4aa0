"""One file for each method, found by name through harness/specs/catalogue.py."""
