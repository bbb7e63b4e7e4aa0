"""Pure tensor operations that methods share: batched, deterministic, free of any model.

Ties are broken the same way everywhere: the higher score first, then the lower index. Kept indices come back ascending.
"""
