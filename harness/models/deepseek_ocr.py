"""DeepSeek-OCR: SAM, a convolution to 1/16 of the cells, CLIP, one linear layer, and a mixture-of-experts decoder.

transformers has no class of this name; its class for Unlimited-OCR has the same modules and tensor names. It differs
in the decoder's attention, which the configuration built here sets to full attention in every layer. Answers are
cleaned up before scoring as in the releases' code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerFast,
    UnlimitedOcrConfig,
    UnlimitedOcrForConditionalGeneration,
    UnlimitedOcrProcessor,
)

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem
from espalier.harness.engine.pixels import PixelGrids
from espalier.harness.errors import unknown_name
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.conversations import PLAIN, join_of
from espalier.harness.models.deepseek_ocr_images import (
    SETTINGS,
    OcrImageProcessor,
    check_views,
    plane,
    view_work,
)
from espalier.harness.models.loader import config_of, load_part
from espalier.harness.models.random_weights import stated, text_config, vision_config
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox, padded_box

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: Sizes of the decoder, under the same names in the release's `language_config` and in the library.
TEXT = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "moe_intermediate_size", "n_routed_experts"),
    *("num_experts_per_tok", "n_shared_experts", "mlp_layer_types", "first_k_dense_replace"),
)

#: Sizes of CLIP and of SAM in the library, and by what name the release's `vision_config.width` gives them.
TOWER = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": None,
}
STEM = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "mlp_dim": None,
    "global_attn_indexes": "global_attn_indexes",
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of each stack stated in a config.json; keys that it omits are absent."""

    text: Mapping[str, Any] = field(default_factory=dict)
    tower: Mapping[str, Any] = field(default_factory=dict)
    stem: Mapping[str, Any] = field(default_factory=dict)


def released_sizes(config: Mapping[str, Any]) -> Sizes:
    """Return the sizes stated in the release's config.json."""
    width = _table(_table(config, "vision_config"), "width")
    clip, sam = _table(width, "clip-l-14-224"), _table(width, "sam_vit_b")
    qwen2 = _table(width, "qwen2-0-5b")  # DeepSeek-OCR 2's
    return Sizes(
        text=_by_name(_table(config, "language_config"), {name: name for name in TEXT}),
        tower=_by_name(clip, TOWER) | _by_name(qwen2, {"hidden_size": "dim"}),
        stem=_by_name(sam, STEM),
    )


def library_sizes(config: Any) -> Sizes:
    """Return the sizes of a configuration of the library's class."""
    vision = config.vision_config

    def values(part: Any, names: Any) -> dict[str, Any]:
        return {name: getattr(part, name) for name in names if hasattr(part, name)}

    return Sizes(
        text=values(config.text_config, TEXT),
        tower=values(vision.encoder_config, TOWER),
        stem=values(vision.sam_config, STEM),
    )


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name)
    return table if isinstance(table, Mapping) else {}


def _by_name(table: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, Any]:
    return {
        name: table[release_name]
        for name, release_name in names.items()
        if release_name is not None and release_name in table
    }


#: A label and its boxes; the label is the first group.
_REFERENCE = re.compile(r"<\|ref\|>(.*?)<\|/ref\|><\|det\|>.*?<\|/det\|>", re.DOTALL)
_DISPLAY = re.compile(r"\\\[.*?\\\]", re.DOTALL)
_NUMBER = re.compile(r"\\quad \([^)]*\)")
_GAP = re.compile(r"\n{3,4}")


def answer_ids(ids: Sequence[int], end: int | None, pad: int) -> list[int]:
    """Return new tokens before the first end or padding token."""
    tokens = []
    for token in ids:
        if token in (end, pad):
            break
        tokens.append(token)
    return tokens


def as_transformers(text: str) -> str:
    """Return an answer as written to a file by the release's transformers code.

    Pictures become markdown links, numbered from 0, with a line break; other labels and boxes are removed; two
    operators that markdown renderers lack are spelt out.
    """
    numbers = count()

    def link(match: re.Match[str]) -> str:
        return f"![](images/{next(numbers)}.jpg)\n" if match[1] == "image" else ""

    return _operators(_REFERENCE.sub(link, text))


def as_vllm(text: str) -> str:
    """Return an answer as written for benchmarks by the release's vLLM code.

    All labels and boxes are removed, also centring tags and the numbers of displayed formulas; three or four line
    breaks become two.
    """
    text = _REFERENCE.sub("", text)
    text = _DISPLAY.sub(lambda match: _NUMBER.sub("", match[0]), text)
    return _GAP.sub("\n\n", text).replace("<center>", "").replace("</center>", "")


def _operators(text: str) -> str:
    return text.replace("\\coloneqq", ":=").replace("\\eqqcolon", "=:")


#: Functions by the value of `model.processor.clean_up`.
CLEAN_UPS: Mapping[str, Callable[[str], str]] = {
    "transformers": as_transformers,
    "vllm": as_vllm,
}


#: Stem tokens along an edge that the convolution merges into one cell.
FOLD = 4


class DeepseekOcrAdapter(Adapter):
    """`UnlimitedOcrForConditionalGeneration`: crops stitched to one plane (view 1), then the global view (view 0).

    Each row of cells ends with a newline token and the image with a separator; both are never pruned.
    """

    model_class: ClassVar[Any] = UnlimitedOcrForConditionalGeneration
    processor_class: ClassVar[Any] = UnlimitedOcrProcessor
    #: That of the release, which refers to remote code, and that of the library's class.
    checkpoint_types = ("deepseek_vl_v2", UnlimitedOcrConfig.model_type)
    settings = (*SETTINGS, "clean_up")
    conversation: ClassVar[str] = "plain"
    joins: ClassVar[Mapping[str, str]] = {}
    pieces = "begun"
    #: The release's config.json belongs to remote code, which holds the image settings.
    self_described = False

    @classmethod
    def format(cls, name: str | None, join: str | None = None, thinking: bool = False) -> str:
        """Return the only format: begin-of-sequence, a line for each image, the text.

        Raises:
            UserError: another format or media rule.
        """
        if name not in (None, cls.conversation):
            raise unknown_name("model.conversation", name, (cls.conversation,))
        join_of(join, cls.joins)
        del thinking
        return PLAIN

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return a processor with the checkpoint's tokenizer; `model.processor` replaces the remote code's settings."""
        return cls.new_processor(spec, _tokenizer(spec))

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the library's configuration with the sizes in the checkpoint's config.json.

        That file belongs to remote code; values that it omits come from the model's config file.
        """
        return cls._described(spec, _tokenizer(spec), cls._sizes(spec))

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the configuration of SAM, CLIP, and the decoder with full attention in every layer."""
        return cls._described(spec, tokenizer, Sizes())

    @classmethod
    def _described(cls, spec: ModelSpec, tokenizer: Any, sizes: Sizes) -> Any:
        facts, stem = spec.facts, stated(spec, "stem", spec.facts.stem)
        text = {
            **text_config(spec, tokenizer),
            "n_routed_experts": facts.text.experts,
            **sizes.text,
        }
        return cls.model_class.config_class(
            vision_config={
                "sam_config": {
                    "hidden_size": stem.hidden,
                    "mlp_dim": stem.intermediate,
                    "num_hidden_layers": stem.layers,
                    "num_attention_heads": stem.heads,
                    **spec.architecture["stem"],
                    **sizes.stem,
                },
                "encoder_config": {**cls._encoder(spec), **sizes.tower},
            },
            text_config={**text, **cls._layer_types(text)},
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            **spec.architecture["model"],
        )

    @classmethod
    def _encoder(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the configuration of the tower after SAM."""
        return vision_config(spec.facts.tower, spec)

    @classmethod
    def _layer_types(cls, text: Mapping[str, Any]) -> dict[str, Any]:
        """Return the types of the decoder's layers: full attention in all."""
        return {"layer_types": ["full_attention"] * text["num_hidden_layers"]}

    @classmethod
    def _sizes(cls, spec: ModelSpec) -> Sizes:
        """Return the sizes in the checkpoint's config.json, in the release's or the library's format."""
        config, config_class = config_of(spec), cls.model_class.config_class
        if config.get("model_type") == config_class.model_type:
            return library_sizes(load_part(spec, config_class))
        return released_sizes(config)

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return a processor with the views of `model.processor`; cells, newlines and separators are tokens."""
        return cls.processor_class(
            image_processor=OcrImageProcessor(
                **{name: value for name, value in spec.processor.items() if name in SETTINGS}
            ),
            tokenizer=tokenizer,
            patch_size=spec.architecture["stem"]["patch_size"],
            downsample_ratio=FOLD,
        )

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return the attention of a CLIP layer; the projector reads the output of the last one."""
        layers = self.model.model.vision_tower.vision_encoder.encoder.layers
        attention: nn.Module = layers[-1 if index is None else index].self_attn
        return attention

    def stem_layers(self) -> Sequence[Any]:
        """Return SAM's layers."""
        layers: Sequence[Any] = self.model.model.vision_tower.sam_encoder.layers
        return layers

    @classmethod
    def check_settings(cls, spec: ModelSpec) -> None:
        """Raise UserError for unknown settings and clean-ups, and for values that make no views."""
        super().check_settings(spec)
        check_views(spec.processor)
        clean_up = spec.processor.get("clean_up")
        if clean_up is not None and clean_up not in CLEAN_UPS:
            raise unknown_name("model.processor.clean_up", str(clean_up), (*CLEAN_UPS, "null"))

    def decode(self, ids: Tensor) -> list[str]:
        """Return answers with the special tokens around labels and boxes, cleaned up by `model.processor.clean_up`.

        Without these tokens, labels and boxes could not be distinguished from text.
        """
        tokenizer = self.processor.tokenizer
        texts = [
            tokenizer.decode(answer_ids(row, tokenizer.eos_token_id, self.pad_id))
            for row in ids.tolist()
        ]
        clean_up = self.spec.processor.get("clean_up")
        clean = str if clean_up is None else CLEAN_UPS[clean_up]
        return [clean(text.strip()).strip() for text in texts]

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per image: crops, then the global view. The projector gets all global views first."""
        if "pixel_values" not in inputs:
            return {self.model.config.image_token_id: []}
        global_views = inputs["pixel_values"]
        # A batch without crops has no such pixels; its counts are 0.
        crop = inputs.get("pixel_values_local", global_views)
        n_whole, n_crop = self._cells(global_views), self._cells(crop)
        first = n_whole**2 * len(global_views)
        items: list[VisualItem] = []
        shapes = zip(inputs["patches_grid"], inputs["num_local_patches"], strict=True)
        for image, ((columns, rows), n_crops) in enumerate(shapes):
            planes = [plane(0, 1, 1, n_whole, image * n_whole**2)]
            work = self._work(global_views)
            if n_crops:
                planes.insert(0, plane(1, columns, rows, n_crop, first))
                first += n_crops * n_crop**2
            for _ in range(n_crops):
                work = work.plus(self._work(crop))
            # The separator takes the position of one more newline at the end.
            planes.append(tuple(table[-1:] for table in planes[-1]))
            grid, unit, tile = (torch.cat(tables) for tables in zip(*planes, strict=True))
            source = unit.clamp(min=0).view(-1, 1)
            items.append(VisualItem(grid, source, prunable=unit >= 0, tile=tile, work=work))
        return {self.model.config.image_token_id: items}

    def view_box(self, view: PictureView) -> ViewBox:
        """Return the padded square of the global view if it is padded; crops are stretched to fill their plane."""
        images = self.processor.image_processor
        stretched = not images.crop_to_patches and (
            images.size["height"] <= images.maximum_pad_value
        )
        return WHOLE if view.index or stretched else padded_box(view)

    def pictures(self, inputs: Mapping[str, Any]) -> PixelGrids:
        """Return all global views, then all crops."""
        names = ("pixel_values", "pixel_values_local")
        views = [inputs[name] for name in names if name in inputs]
        side = FOLD * int(self.model.config.vision_config.sam_config.patch_size)
        return PixelGrids(views, [self._cells(pixels) for pixels in views], side, *self.colours())

    def _cells(self, views: Tensor) -> int:
        """Return the number of cells along an edge of (views, 3, S, S) pixels."""
        return -(-self._patches(views) // FOLD)

    def _patches(self, views: Tensor) -> int:
        """Return the number of stem tokens along an edge."""
        return int(views.shape[-1]) // int(self.model.config.vision_config.sam_config.patch_size)

    def _work(self, views: Tensor) -> Work:
        """Return the work of one view."""
        window = self.model.config.vision_config.sam_config.window_size
        return view_work(self._cells(views), self._patches(views), window)


def _tokenizer(spec: ModelSpec) -> Any:
    """Return the tokenizer of tokenizer.json; the class named in the checkpoint's settings would rebuild it."""
    return load_part(spec, PreTrainedTokenizerFast)
