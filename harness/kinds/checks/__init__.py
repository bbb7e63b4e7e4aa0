"""Everything about a run that can be refused before a model is loaded."""
