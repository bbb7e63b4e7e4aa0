"""Model families, a file each: the facts that the engine cannot derive."""
