"""From a command line to checked, frozen runs; nothing here loads a model."""
