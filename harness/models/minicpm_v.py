"""MiniCPM-V 4.6 (Yu et al., 2025, arXiv 2509.18154): SigLIP on views of any shape, two joins of 2x2, Qwen3.5.

The first join is inside the tower, after an attention among the four tokens: the layers before it are the stem here,
and methods see the layers after it as the tower. The second is the projector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessor,
    MiniCPMV4_6Processor,
    MiniCPMV4_6VideoProcessor,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.architectures.patch_lists import RasterPatchesAdapter, squares
from espalier.harness.models.conversations import LINED
from espalier.harness.models.random_weights import (
    HALF,
    LINEAR,
    Built,
    built_processor,
    of,
    text_config,
    vision_config,
)
from espalier.harness.models.view_placement import PictureView
from espalier.harness.settings import Count
from espalier.harness.specs.run_spec import ModelSpec

#: Special tokens by the names under which the processor looks for them.
TOKENS = {
    **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    **{"image_start_token": "<image>", "image_end_token": "</image>"},
    **{"slice_start_token": "<slice>", "slice_end_token": "</slice>"},
    **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
}

#: Edge of a square of patches, and of tokens of the tower, that becomes one.
SIDE = 2


#: The released colours, for the tower's patches.
PIXELS = {"patch_size": of("architecture.vision.patch_size"), "image_mean": HALF, "image_std": HALF}


#: Layers before the first join.
STEM = of("facts.stem.layers")


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


class MiniCpmVAdapter(RasterPatchesAdapter):
    """`MiniCPMV4_6ForConditionalGeneration`: the whole picture (view 0), then its slices 1..n in raster order."""

    data = FamilyData(
        model_class=MiniCpmVForGeneration,
        conversation="minicpm_v",
        media=LINED,
        placeholders=(TOKENS["image_token"],),
        inline=None,
        lacking=("luma",),  # the tower gets a list of patches, from pictures of any size
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *TOKENS.values()),
        named_tokens=TOKENS,
        processor_class=MiniCPMV4_6Processor,
        settings={
            name: (f"image_processor.{name}", Count)
            for name in ("max_slice_nums", "scale_resolution")
        },
        projector="model.merger",
        vision=vision_config(
            num_hidden_layers=lambda spec, _: STEM(spec, _) + spec.facts.tower.layers
        ),
        text=text_config(model_type="qwen3_5_text", **LINEAR),
        config={"insert_layer_id": lambda spec, _: STEM(spec, _) - 1},
        token_ids={f"{name}_id": TOKENS[name] for name in ("image_token", "video_token")},
        processor=built_processor(
            MiniCPMV4_6Processor,
            image_processor=Built(MiniCPMV4_6ImageProcessor, PIXELS),
            video_processor=Built(MiniCPMV4_6VideoProcessor, PIXELS),
        ),
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Refuse the other mode of the class, which leaves out the step inside the tower."""
        modes = {model.config.downsample_mode, processor.image_processor.downsample_mode}
        if modes != {"16x"}:
            raise UserError(
                f"model={spec.name}: downsample_mode={', '.join(sorted(modes))} (config.json, "
                "preprocessor_config.json) is not implemented; valid: 16x"
            )
        super().__init__(model, processor, spec)

    def tower_layers(self) -> nn.ModuleList:
        """Return the layers after the step that joins tokens."""
        return cast("nn.ModuleList", self._layers[self._first :])

    def stem_layers(self) -> Sequence[Any]:
        """Return the layers before that step."""
        return list(self._layers[: self._first])

    @property
    def _layers(self) -> Any:
        return self.model.model.vision_tower.encoder.layers

    @property
    def _first(self) -> int:
        """The first layer after the step."""
        return int(self.model.config.vision_config.insert_layer_id) + 1

    def stem_joins(self) -> int:
        """Return the tokens of a window."""
        tower = self.model.model.vision_tower
        return int(tower.vit_merger.linear_1.in_features) // int(tower.config.hidden_size)

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return the attention of a layer after the stem; by default, of the last."""
        layer: Any = self.tower_layers()[-1 if index is None else index]
        return cast("nn.Module", layer.self_attn)

    def grids(self, inputs: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return rows and columns of patches of each view of a batch."""
        sizes = inputs["target_sizes"].tolist() if "target_sizes" in inputs else []
        return [(rows, columns) for rows, columns in sizes]

    def coarse_inputs(self, inputs: Mapping[str, Any], share: float) -> dict[str, Any]:
        """Return inputs with coarse views, which the processor has cut into patches side by side (1, 3, p, P p)."""
        if "pixel_values" not in inputs:
            return dict(inputs)
        edge = self.model.config.vision_config.patch_size
        patches = inputs["pixel_values"][0].unflatten(-1, (-1, edge)).permute(2, 0, 1, 3)
        batch = super().coarse_inputs({**inputs, "pixel_values": patches.contiguous()}, share)
        packed = batch["pixel_values"].permute(1, 2, 0, 3).flatten(2)
        return {**inputs, "pixel_values": packed.unsqueeze(0)}

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per picture: each run of placeholders is a view, the first after the mark of a picture."""
        config, grids = self.model.config, self.grids(inputs)
        mark = self.processor.tokenizer.convert_tokens_to_ids(TOKENS["image_start_token"])
        ids = inputs["input_ids"].flatten().cpu()
        visual = ids == config.image_token_id
        begins = ids[:-1][visual[1:] & ~visual[:-1]]
        firsts = [*torch.nonzero(begins == mark)[:, 0].tolist(), len(grids)]
        counts = (rows * columns // SIDE**2 for rows, columns in grids)
        units = [*accumulate(counts, initial=0)]
        return {config.image_token_id: [_item(grids[a:b], units[a]) for a, b in pairwise(firsts)]}

    def tiles_of(self, view: PictureView) -> tuple[int, int]:
        """Return the rows and columns of slices of a picture."""
        images, (width, height) = self.processor.image_processor, view.size
        rows, columns = images.get_sliced_grid(
            (height, width), images.max_slice_nums, images.scale_resolution
        )
        return rows, columns


def _item(grids: Sequence[tuple[int, int]], first: int) -> VisualItem:
    """Return the item of a picture with views of `grids` patches, starting at projector unit `first`."""
    places, sources, work = [], [], Work()
    for view, (rows, columns) in enumerate(grids):
        height, width = rows // SIDE, columns // SIDE
        patches, tokens = rows * columns, height * width
        source = squares(height, width, SIDE, first)
        places.append(rectangle(1, height // SIDE, width // SIDE, view))
        sources.append(source)
        work = work.plus(
            Work(
                tokens=tokens,
                pairs=tokens**2,
                units=len(source),
                stem_tokens=patches,
                stem_pairs=patches**2,
            )
        )
        first += tokens
    source = torch.cat(sources)
    return VisualItem(torch.cat(places), source, torch.full(source.shape, SIDE**-2), work=work)
