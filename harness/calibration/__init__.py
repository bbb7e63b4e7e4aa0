"""The positional prior: measured over many images, stored with its key, resized to other grids."""
