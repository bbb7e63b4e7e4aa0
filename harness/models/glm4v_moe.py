"""GLM-4.5V and GLM-4.6V: GLM-4.1V with experts."""

from __future__ import annotations

from dataclasses import replace

from transformers import Glm4vMoeForConditionalGeneration

from espalier.harness.models.glm4v import Glm4vAdapter


class Glm4vMoeAdapter(Glm4vAdapter):
    """`Glm4vMoeForConditionalGeneration`: experts in every decoder layer but the first."""

    data = replace(
        Glm4vAdapter.data,
        model_class=Glm4vMoeForConditionalGeneration,
        types=("glm4v_moe",),
    )
