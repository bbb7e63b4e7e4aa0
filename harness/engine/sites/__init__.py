"""One file for each kind of site: what it shortens, when, and the hooks that it needs for that."""
