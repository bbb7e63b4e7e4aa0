"""MiniCPM-V 4.6's class with logits at the tokens that a step asks for."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import MiniCPMV4_6ForConditionalGeneration
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep


class MiniCpmVForGeneration(MiniCPMV4_6ForConditionalGeneration):
    """The library's class, which in transformers 5.23 has logits (B, L, V) at every token of a prompt."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        mm_encoder_outputs: Any = None,
        logits_to_keep: int | Tensor = 0,
        **inputs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits at the last `logits_to_keep` tokens, or at all for 0, as other classes do."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            mm_encoder_outputs=mm_encoder_outputs,
            **inputs,
        )
        return CausalLMOutputWithPast(
            logits=self.lm_head(slice_logits_to_keep(output[0], logits_to_keep)),
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )
