"""The vision tower, block by block, with a method between the halves of some blocks."""
