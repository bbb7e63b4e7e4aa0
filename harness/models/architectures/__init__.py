"""Released architectures that transformers lacks, and the formats of releases that are loaded as they are."""
