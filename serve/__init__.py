"""Methods of `methods/` inside vLLM, as a plug-in of it; imports torch, vLLM and `methods/` alone."""
