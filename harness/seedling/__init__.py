"""Seedling: a tiny LLaVA on synthetic scenes, trained on CPU, used to test and study token reduction."""
