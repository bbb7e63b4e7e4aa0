"""The way in for Python: a model, a method on it for the length of a `with`, questions and answers."""
