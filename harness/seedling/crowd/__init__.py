"""Crowded scenes: four times the area of seedling's, with distractors, numbers and up to nine of a kind."""
