"""One file for each kind of site: what it shortens, when, and with which hooks."""
