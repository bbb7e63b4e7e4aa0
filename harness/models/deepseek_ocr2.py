"""DeepSeek-OCR 2 (arXiv 2601.20552): DeepSeek-OCR with Qwen2 0.5B as an encoder in place of CLIP.

It reads the cells of a view, which all see one another, and after them as many learned queries; a query sees all cells
and the queries up to itself. The projector maps the queries alone: visual tokens have an order, and no place in the
picture.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekOcr2Config, DeepseekOcr2ForConditionalGeneration

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import rectangle
from espalier.harness.errors import UserError
from espalier.harness.models.architectures.deepseek_ocr import FOLD, OwnViewsProcessor
from espalier.harness.models.deepseek_ocr import (
    EXPERTS,
    DeepseekOcrAdapter,
    ocr_processor,
    ocr_vision,
)
from espalier.harness.models.random_weights import of, vision_config
from espalier.harness.specs.run_spec import ModelSpec

#: Rows of the class's two tables of queries. A view must have as many cells, since each gets a placeholder.
QUERIES = (144, 256)


def dense_layers(**text: Any) -> dict[str, Any]:
    """Return a decoder's arguments, with the types of its MLPs by the release's count of dense ones, without a list."""
    n_dense = text.get("first_k_dense_replace", 1)
    types = ["dense"] * n_dense + ["sparse"] * (text["num_hidden_layers"] - n_dense)
    return {**text, "mlp_layer_types": text.get("mlp_layer_types") or types}


class DeepseekOcr2Adapter(DeepseekOcrAdapter):
    """`DeepseekOcr2ForConditionalGeneration`: queries of each crop (views 1..n), of the global view (0), a separator.

    The separator is never pruned. `pictures` pairs query k with cell k, since there are as many: a mean over a view, as
    in RTPrune's dynamic ratio, is valid, and a single pair has no meaning.
    """

    data = replace(
        DeepseekOcrAdapter.data,
        model_class=DeepseekOcr2ForConditionalGeneration,
        # That of the release, which is DeepSeek-OCR's too, and that of the library's class.
        types=("deepseek_vl_v2", DeepseekOcr2Config.model_type),
        unplaced=True,
        # Probes of the tower's attention ignore masks, which the encoder needs.
        lacking=("cls_attention", "cls_logits", "wide_cls_attention", "tower_received"),
        blocks="vision_encoder.layers",
        vision=ocr_vision(vision_config(num_key_value_heads=of("facts.tower.kv_heads"))),
        text=replace(EXPERTS, part_class=dense_layers),
        processor=ocr_processor(OwnViewsProcessor),
    )

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

    def to_units(self, values: Tensor) -> Tensor:
        """Return the queries' (units, ...) of (views, cells and queries, ...) values."""
        return values[:, values.shape[1] // 2 :].flatten(0, 1)

    def plane(
        self, view: int, columns: int, rows: int, side: int, first: int
    ) -> tuple[Tensor, ...]:
        """Return a row of queries of the global view, or of each crop."""
        views = range(1, columns * rows + 1) if view else (0,)
        grid = torch.cat([rectangle(1, 1, side**2, number) for number in views])
        units = torch.arange(first, first + len(grid))
        return grid, units, torch.zeros_like(units)

    def _work(self, views: Tensor) -> Work:
        """Return the work of one view."""
        cells = self._cells(views) ** 2
        # Cells see cells; queries see cells, and queries up to themselves.
        pairs = 2 * cells**2 + cells * (cells + 1) // 2
        return super()._work(views)._replace(tokens=2 * cells, pairs=pairs)
