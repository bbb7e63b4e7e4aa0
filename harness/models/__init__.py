"""One small file for each model family: the facts that the engine cannot guess."""
