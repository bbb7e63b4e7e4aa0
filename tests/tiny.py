"""Tiny random models of real architectures, saved to disk and loaded the way a real checkpoint is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from harness.adapters.llava import LlavaAdapter
from harness.config.spec import ModelSpec
from harness.facts import ModelFacts, StackFacts
from methods.base import SIGNALS, Assignment, Plan, Site, TokenReducer, View

WORDS = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    "<image>",
    "USER:",
    "ASSISTANT:",
    *(f"w{i}" for i in range(57)),
]
DEPTH = 5
TEMPLATE = (
    "<s> {% for m in messages %}USER: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "ASSISTANT:"
)

FACTS = ModelFacts(
    text=StackFacts(DEPTH, 32, 48, 4, 2, 8, gated=True, causal=True),
    tower=StackFacts(2, 32, 48, 4, 4, 8, gated=False, causal=False),
    vocabulary=len(WORDS),
    visual_tokens=16,
    tower_tokens=17,
    class_token=True,
    signals=frozenset(SIGNALS),
)


def save_llava(folder: Path, seed: int = 0) -> Path:
    """Save a random LLaVA (2 KV heads for 4 query heads, 4 x 4 patches) with tokenizer and processor."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"height": 28, "width": 28}, crop_size={"height": 28, "width": 28}
        ),
        tokenizer=fast,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )
    torch.manual_seed(seed)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=28,
            patch_size=7,
        ),
        text_config=LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=DEPTH,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        image_token_id=4,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=16,
    )
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():  # sharper than the default, whose attention is nearly uniform
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(6.0)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def load_llava(folder: Path, dtype: str = "float64", attention: str = "sdpa") -> LlavaAdapter:
    """Load through the adapter, as a real checkpoint would be."""
    spec = ModelSpec(
        name="tiny",
        adapter="llava",
        path=folder,
        hub=None,
        revision=None,
        dtype=dtype,
        attention=attention,
        weights="trained",
        device="cpu",
        facts=FACTS,
    )
    return LlavaAdapter.load(spec)


def picture(seed: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (28, 28, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def chat(text: str, *seeds: int) -> list[dict]:
    """One user turn with a picture for each seed."""
    images = [{"type": "image", "image": picture(seed)} for seed in seeds]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


#: Three rows that need left padding: other text lengths, and two images in the second.
CHATS = [chat("w1 w2 w3", 0), chat("w4", 1, 2), chat("w5 w6 w7 w8 w9", 3)]


@dataclass(frozen=True)
class Scatter(TokenReducer):
    """A test reducer for any sites: keeps tokens by a hash of their coordinates; optionally merges the rest.

    `where` holds one entry for each site: "vision", "prefix" or a layer number.
    """

    where: tuple[str | int, ...] = ("prefix",)
    merge: bool = False

    def sites(self, depth: int) -> tuple[Site, ...]:
        return tuple(
            Site("layer", place) if isinstance(place, int) else Site(place) for place in self.where
        )

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        return tuple(share ** ((n + 1) / n_sites) for n in range(n_sites))

    def plan(self, view: View, keep: int) -> Plan:
        image, _, row, column = view.grid.unbind(-1)
        order = (image * 7 + row * 5 + column * 11 + row * column * 3) % 17
        kept = order.argsort(dim=1, stable=True)[:, :keep].sort(dim=1).values
        if not self.merge:
            return Plan(kept)
        n_tokens = view.tokens.shape[1]
        slot = torch.searchsorted(
            kept, torch.arange(n_tokens).expand(kept.shape[0], -1).contiguous()
        )
        slot = slot.clamp(max=keep - 1)
        return Plan(kept, Assignment(slot, torch.full(slot.shape, 0.5)))
