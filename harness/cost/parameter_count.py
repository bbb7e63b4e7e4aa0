"""Number of parameters of a model by its facts, to check memory before anything is loaded."""

from __future__ import annotations

from itertools import pairwise

from espalier.harness.cost.facts import ModelFacts, StackFacts

#: Bytes per parameter by precision.
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def parameters(facts: ModelFacts) -> int:
    """Return the entries of all matrices, without norms, biases, patch embeddings and positions (about a percent).

    Embedding and output head both count, though some models share them. Of a layer with experts only those that one
    token goes through count, as the facts have no others.
    """
    towers = [facts.tower] + ([facts.stem] if facts.stem is not None else [])
    projector = sum(a * b for a, b in pairwise(facts.projector)) * (1 + len(facts.deepstack))
    words = 2 * facts.vocabulary * facts.text.hidden
    return sum(map(_stack, (facts.text, *towers))) + projector + words


def weight_bytes(facts: ModelFacts, dtype: str) -> int:
    """Return the bytes of these parameters in a precision, one of BYTES."""
    return parameters(facts) * BYTES[dtype]


def _stack(stack: StackFacts) -> int:
    """Return the parameters of all layers of a stack."""
    attention = 2 * stack.hidden * stack.head_dim * (stack.heads + stack.kv_heads)
    first = stack.intermediate if stack.first_intermediate is None else stack.first_intermediate
    widths = first + (stack.layers - 1) * stack.intermediate
    mlp = (3 if stack.gated else 2) * stack.hidden * widths
    return stack.layers * attention + mlp
