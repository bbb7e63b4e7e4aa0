"""Answers of another program: vLLM with the plug-in of `serve/`, in a child process of its own environment."""
