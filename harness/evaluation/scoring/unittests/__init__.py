"""The unit tests of olmOCR-Bench: facts about a page that an answer in markdown must state."""
