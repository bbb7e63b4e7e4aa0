"""Tiny models of the families that the plug-in serves, with heads of the width that vLLM's kernels take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.families import internvl, llava, onevision, qwen
from tests.tiny import DEPTH, Family, StackFacts, chat, picture

#: 32 channels a head: the narrowest that vLLM's attention for processors has.
TEXT = StackFacts(DEPTH, 128, 256, 4, 2, 32, gated=True, causal=True)

#: Pictures of several shapes.
SIZES = ((56, 56), (84, 56), (28, 70), (56, 28), (70, 84), (42, 56))

PICTURES = tuple(
    chat(f"w{number} w{number + 3} w5", picture(number, *size)) for number, size in enumerate(SIZES)
)


#: Two pictures in a prompt, and one that two prompts share.
PAIRS = tuple(
    chat(f"w{n} w{n + 3} w5", picture(n, *SIZES[n]), picture(n + 1, *SIZES[n + 1]))
    for n in range(4)
)


def wide(family: Family, chats: Any = None, sections: Any = None, **text: Any) -> Family:
    """The family with a decoder of TEXT; of its own chats those with one picture or video."""
    spec = family.spec
    facts = replace(spec.facts, text=TEXT, projector=(*spec.facts.projector[:-1], 128))
    if spec.adapter in ("llava", "llava_next", "llava_onevision", "internvl"):
        facts = replace(facts, projector=(spec.facts.projector[0], 128, 128))
    stated = dict(spec.architecture.get("text", {}), **text)
    if sections is not None:
        stated["rope_parameters"] = {**stated["rope_parameters"], "mrope_section": sections}
    architecture = {**spec.architecture, **({"text": stated} if stated else {})}
    if "vision_aspect_ratio" in architecture.get("model", {}):
        # vLLM takes nine for any checkpoint.
        architecture["model"] = {**architecture["model"], "vision_aspect_ratio": "anyres_max_9"}
    if chats is None:
        chats = [c for c in family.chats if sum(p["type"] != "text" for p in c[0]["content"]) == 1]
    return Family(replace(spec, facts=facts, architecture=architecture), tuple(chats))


FAMILIES: dict[str, Family] = {
    "llava": wide(llava.FAMILIES["llava"], PICTURES),
    "llava_pairs": wide(llava.FAMILIES["llava"], PAIRS),
    "llava_next": wide(llava.FAMILIES["llava_next"], PICTURES),
    "llava_next_pairs": wide(llava.FAMILIES["llava_next"], PAIRS),
    "onevision": wide(onevision.FAMILIES["onevision_image"], PICTURES),
    "onevision_video": wide(onevision.FAMILIES["onevision_video"]),
    "internvl": wide(internvl.FAMILIES["internvl"], PICTURES),
    "internvl_pairs": wide(internvl.FAMILIES["internvl"], PAIRS),
    "internvl_video": wide(internvl.FAMILIES["internvl_video"]),
    "qwen2_vl": wide(qwen.FAMILIES["qwen2_vl"], PICTURES, [4, 6, 6]),
    "qwen2_vl_pairs": wide(qwen.FAMILIES["qwen2_vl"], PAIRS, [4, 6, 6]),
    "qwen2_vl_video": wide(qwen.FAMILIES["qwen2_vl_video"], None, [4, 6, 6]),
    "qwen2_5_vl": wide(qwen.FAMILIES["qwen2_5_vl"], PICTURES, [4, 6, 6]),
    "qwen2_5_vl_video": wide(qwen.FAMILIES["qwen2_5_vl_video"], None, [4, 6, 6]),
    "qwen3_vl": wide(qwen.FAMILIES["qwen3_vl"], PICTURES, [6, 5, 5], head_dim=32),
    "qwen3_vl_pairs": wide(qwen.FAMILIES["qwen3_vl"], PAIRS, [6, 5, 5], head_dim=32),
    "qwen3_vl_video": wide(qwen.FAMILIES["qwen3_vl_video"], None, [6, 5, 5], head_dim=32),
}
