"""DeepSeek-OCR 2 (arXiv 2601.20552): SAM, a convolution, Qwen2 0.5B as an encoder, and DeepSeek-OCR's decoder.

The encoder reads the cells of a view, which all see one another, and after them as many learned queries; a query sees
all cells and the queries up to itself. The projector maps the queries alone: visual tokens have an order, and no place
in the picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekOcr2Config,
    DeepseekOcr2ForConditionalGeneration,
    DeepseekOcr2Processor,
    UnlimitedOcrProcessor,
)
from transformers.processing_utils import ImagesKwargs

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.errors import UserError
from espalier.harness.models.deepseek_ocr import FOLD, DeepseekOcrAdapter

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: Rows of the class's two tables of queries. A view must have as many cells, since each gets a placeholder.
QUERIES = (144, 256)


class OwnViewsProcessor(DeepseekOcr2Processor):
    """The library's processor, without its values for crops, which would override those of `model.processor`."""

    images_kwargs = ImagesKwargs()
    skip_tensor_conversion = UnlimitedOcrProcessor.skip_tensor_conversion


class DeepseekOcr2Adapter(DeepseekOcrAdapter):
    """`DeepseekOcr2ForConditionalGeneration`: queries of each crop (views 1..n), of the global view (0), a separator.

    The separator is never pruned. `pictures` pairs query k with cell k, since there are as many: a mean over a view, as
    in RTPrune's dynamic ratio, is valid, and a single pair has no meaning.
    """

    model_class: ClassVar[Any] = DeepseekOcr2ForConditionalGeneration
    processor_class: ClassVar[Any] = OwnViewsProcessor
    #: That of the release, which is DeepSeek-OCR's too, and that of the library's class.
    checkpoint_types = ("deepseek_vl_v2", DeepseekOcr2Config.model_type)
    unplaced = True
    #: Probes of the tower's attention ignore masks, which the encoder needs.
    lacking = ("cls_attention", "cls_logits", "wide_cls_attention", "tower_received")

    @classmethod
    def _encoder(cls, spec: ModelSpec) -> dict[str, Any]:
        return {**super()._encoder(spec), "num_key_value_heads": spec.facts.tower.kv_heads}

    @classmethod
    def _layer_types(cls, text: Mapping[str, Any]) -> dict[str, Any]:
        """Return the types of the decoder's MLPs, by the release's count of dense ones if there is no list."""
        n_dense = text.get("first_k_dense_replace", 1)
        types = ["dense"] * n_dense + ["sparse"] * (text["num_hidden_layers"] - n_dense)
        return {"mlp_layer_types": text.get("mlp_layer_types") or types}

    @classmethod
    def check_settings(cls, spec: ModelSpec) -> None:
        """Raise UserError for unknown settings, and for views with a number of cells that has no table of queries."""
        super().check_settings(spec)
        if "stem" not in spec.architecture:
            return  # a model in memory comes with its processor
        cell = FOLD * spec.architecture["stem"]["patch_size"]
        valid = [cell * math.isqrt(queries) for queries in QUERIES]
        sides = {f"size.{name}": side for name, side in spec.processor.get("size", {}).items()}
        sides["tile_size"] = spec.processor.get("tile_size")
        for name, side in sides.items():
            if side not in (*valid, None):
                raise UserError(
                    f"model.processor.{name}={side}: model={spec.name!r} has learned queries for views of "
                    f"{valid[0]} and {valid[1]} pixels alone; valid: {valid[0]}, {valid[1]}"
                )

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor; the class takes no grid of crops, since they are not stitched."""
        inputs = super().process(texts, pictures, clips)
        inputs.pop("patches_grid", None)
        return inputs

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return the attention of an encoder layer; by default, of the last."""
        layers = self.model.model.vision_tower.vision_encoder.layers
        attention: nn.Module = layers[-1 if index is None else index].self_attn
        return attention

    def to_units(self, values: Tensor) -> Tensor:
        """Return the queries' (units, ...) of (views, cells and queries, ...) values."""
        return values[:, values.shape[1] // 2 :].flatten(0, 1)

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per image: a row of queries for each view. The projector gets all global views first."""
        items: list[VisualItem] = []
        if "pixel_values" in inputs:
            global_views = inputs["pixel_values"]
            # A batch without crops has no such pixels; its counts are 0.
            crops = inputs.get("pixel_values_local", global_views)
            n_page, n_crop = self._cells(global_views) ** 2, self._cells(crops) ** 2
            first = n_page * len(global_views)
            for image, count in enumerate(map(int, inputs["num_local_patches"])):
                views = [rectangle(1, 1, n_crop, view) for view in range(1, count + 1)]
                page = rectangle(1, 1, n_page)
                unit = [torch.arange(first, first + count * n_crop)]
                unit.append(torch.arange(image * n_page, (image + 1) * n_page))
                first += count * n_crop
                work = self._work(global_views)
                for _ in range(count):
                    work = work.plus(self._work(crops))
                items.append(_item(torch.cat([*views, page]), torch.cat(unit), work))
        return {self.model.config.image_token_id: items}

    def _work(self, views: Tensor) -> Work:
        """Return the work of one view."""
        cells = self._cells(views) ** 2
        # Cells see cells; queries see cells, and queries up to themselves.
        pairs = 2 * cells**2 + cells * (cells + 1) // 2
        return super()._work(views)._replace(tokens=2 * cells, pairs=pairs)


def _item(grid: Tensor, unit: Tensor, work: Work) -> VisualItem:
    """Return the item of an image's queries; the separator takes the place of one more at the end."""
    places, source = torch.cat([grid, grid[-1:]]), torch.cat([unit, unit[-1:]])
    prunable = torch.ones(len(places), dtype=torch.bool)
    prunable[-1] = False
    return VisualItem(places, source.view(-1, 1), prunable=prunable, work=work)
