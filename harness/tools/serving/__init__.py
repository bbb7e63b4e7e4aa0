"""Times of requests to a serving engine under load, with and without a method."""
