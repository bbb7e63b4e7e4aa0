"""The frame: everything around a method, from the config to the stored row."""
