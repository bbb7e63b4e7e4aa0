"""The Python interface: load a model, apply a method inside a `with`, ask questions."""
