"""One file for each method, found by name through methods/registry.py."""
