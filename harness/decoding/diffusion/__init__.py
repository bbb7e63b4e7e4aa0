"""Masked-diffusion decoding: a whole answer of masks, unveiled step by step."""
