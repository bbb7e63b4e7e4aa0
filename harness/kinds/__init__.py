"""What a run does with each kind of method, behind one protocol: one file a kind, found by the method's base class."""
