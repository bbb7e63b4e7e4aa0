"""Files that survive crashes and second writers, and files that others wrote."""
