"""Answers of another program: vLLM with the plug-in of `serve/`, in a child process with its own environment."""
