"""Families compared with the code of their releases, which was run once, elsewhere, on tiny random weights.

`released/<family>.json` holds what that code computed and where it is from: names and shapes of its tensors, its
config.json, ids, pixels, logits and greedy answers. Weights, pictures and videos follow from seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.facts import StackFacts
from espalier.harness.engine.session import Session
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.models.random_weights import byte_tokenizer
from espalier.harness.specs.run_spec import ModelSpec, VideoSpec
from espalier.harness.tools.convert import convert_internvl
from espalier.methods.none import NoReduction
from tests.convert.test_internvl import CHATML, PHI3, write_format, write_tokenizer
from tests.families.internvl import small
from tests.families.onevision import ONEVISION, watch
from tests.tiny import chat, model_of, tiny_spec

#: Of the largest logit; 4.6e-6 was measured, of which stored digits are 5e-7 or less.
TOLERANCE = 1e-5
#: Of DeepSeek-OCR 2: 1.9e-5 was measured, and 3.5e-5 between the release's own answers in single and double precision;
#: both codes in double precision, with SAM's relative positions interpolated in single, differ by 4.4e-6.
LOOSER = 4e-5
#: The token with logits stored for every position.
COLUMN = 40
TEXT = StackFacts(3, 32, 48, 4, 2, 8, gated=True, causal=True)
SIGLIP = ONEVISION.architecture


@cache
def vectors(family: str) -> Mapping[str, Any]:
    file = Path(__file__).with_name("released") / f"{family}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def write_release(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> None:
    """Write config.json and fp32 tensors under the release's names, drawn in the order of the names."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        values = torch.randn(shape, generator=generator)
        if len(shape) < 2:
            tensors[name] = values * 0.1 + name.endswith("weight")
        else:
            width = math.prod(shape[1:])
            tensors[name] = values * (0.5 if shape[0] == 1 else 1.5 / math.sqrt(width))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def still(seed: int, width: int, height: int, block: int = 8) -> Image.Image:
    """Return a picture of squares of random colours."""
    generator = torch.Generator().manual_seed(seed)
    shape = (-(-height // block), -(-width // block), 3)
    cells = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).numpy()
    return Image.fromarray(cells.repeat(block, 0).repeat(block, 1)[:height, :width].copy())


#: Seed, number of frames and rate of videos.
FILMS = {"a": (100, 9, Fraction(4)), "b": (200, 24, Fraction(5, 2)), "c": (300, 12, Fraction(4))}


def film(folder: Path, name: str, width: int, height: int, block: int) -> str:
    """Write a video without loss; its frames are independent pictures."""
    seed, frames, rate = FILMS[name]
    path = folder / f"{name}.mov"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "rgb24"
        for number in range(frames):
            frame = av.VideoFrame.from_image(still(seed + number, width, height, block))
            container.mux(list(stream.encode(frame)))
        container.mux(list(stream.encode()))
    return str(path)


def compare_ids(ids: Tensor, expected: list[list[int]]) -> None:
    """Compare the ids of a prompt with [id, count] of each run."""
    assert [[token, len(list(group))] for token, group in groupby(ids.tolist())] == expected


def compare_views(adapter: Adapter, views: Iterable[Tensor], expected: list[list[float]]) -> None:
    """Compare the mean levels of 4 x 4 blocks of each view (3, H, W)."""
    images = adapter.processor.image_processor
    mean, deviation = torch.tensor([images.image_mean, images.image_std]).view(2, 3, 1, 1)
    for view, levels in zip(views, expected, strict=True):
        grey = ((view * deviation + mean) * 255).double().mean(0)
        blocks = grey.unflatten(1, (4, -1)).unflatten(0, (4, -1)).mean((1, 3))
        assert (blocks - torch.tensor(levels).view(4, 4)).abs().max() < 1e-3


def compare_answer(
    adapter: Adapter, inputs: Any, case: Mapping[str, Any], tolerance: float = TOLERANCE
) -> None:
    """Compare the logits of a prompt and the greedy answer."""
    with torch.inference_mode():
        logits = adapter.model(**inputs).logits[0]
    for values, stated in ((logits[:, COLUMN], "column"), (logits[-1], "last")):
        expected = torch.tensor(case[stated])
        assert values.shape == expected.shape
        assert (values - expected).abs().max() < tolerance * expected.abs().max()
    with Session(adapter, NoReduction(), Budget("kept", 0.0)) as session:
        answer = session.generate(inputs, max_new_tokens=8, do_sample=False)
    assert answer.ids[0].tolist() == case["new"]


# ---------------------------------------------------------------------- DeepSeek-OCR

MARKDOWN = "<|grounding|>Convert the document to markdown."


def deepseek_release(folder: Path, family: str) -> Path:
    """Write a tiny release of DeepSeek-OCR or of DeepSeek-OCR 2, which have the same model type."""
    table = vectors(family)
    config = {"model_type": "deepseek_vl_v2", "language_config": table["config"]}
    write_release(folder, config, table["tensors"])
    byte_tokenizer(("<s>", "<s>", "</s>", "<pad>", "<image>")).save_pretrained(folder)
    return folder


#: Facts of each tiny release.
FACTS: Mapping[str, dict[str, Any]] = {
    "deepseek_ocr": {
        "tower": StackFacts(2, 32, 64, 4, 4, 8, gated=False, causal=False),
        "projector": (64, 32),
        "class_attention": "token",
    },
    "deepseek_ocr2": {
        "tower": StackFacts(2, 32, 64, 4, 2, 8, gated=True, causal=True),
        "projector": (32, 32),
        "class_attention": "mean",
    },
}
#: Family and mode of stored cases, the config file with patches, windows and views, and changes of `model.processor`.
MODES: Mapping[tuple[str, str], tuple[str, dict[str, Any]]] = {
    **{
        ("deepseek_ocr", mode): (f"deepseek_ocr_{mode}", {})
        for mode in ("tiny", "small", "base", "large", "gundam")
    },
    ("deepseek_ocr2", "release"): ("deepseek_ocr2", {}),
    ("deepseek_ocr2", "768"): (
        "deepseek_ocr2",
        {"crop_to_patches": False, "size": {"height": 768, "width": 768}},
    ),
    ("deepseek_ocr2", "1024"): ("deepseek_ocr2", {"crop_to_patches": False}),
}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The tiny releases, by family."""
    return {
        family: deepseek_release(tmp_path_factory.mktemp("release"), family) for family in FACTS
    }


def deepseek_adapter(folder: Path, family: str, mode: str, **processor: Any) -> Adapter:
    model, changes = MODES[family, mode]
    real = model_of(f"model={model}", "model.prompt=original")
    stem = {"global_attn_indexes": [1], "output_channels": 8, "downsample_channels": [16, 32]}
    spec = tiny_spec(
        real.adapter,
        text=replace(TEXT, intermediate=60, kv_heads=4, first_intermediate=48, experts=8),
        stem=StackFacts(2, 16, 64, 2, 2, 8, gated=False, causal=False, window_layers=1),
        processor={**real.processor, **changes, **processor},
        architecture={
            **real.architecture,
            "stem": {**real.architecture["stem"], **stem},
            "model": {"experts_implementation": "eager"},
        },
        path=folder,
        weights="trained",
        **FACTS[family],
    )
    return load_adapter(spec)


def compare_pages(adapter: Adapter, case: Mapping[str, Any], *pictures: Image.Image) -> Any:
    """Compare ids, grids of crops and views of pages; return the inputs."""
    inputs = adapter.encode([chat(MARKDOWN, *pictures)])
    compare_ids(inputs["input_ids"][0], case["ids"])
    grids = case.get("grids") or [case["grid"]]
    crops = [math.prod(grid) for grid in grids]
    expected = {
        "patches_grid": grids,
        "num_local_patches": [count if count > 1 else 0 for count in crops],
    }
    stated = expected.keys() & inputs.keys()
    assert stated
    assert {name: inputs[name] for name in stated} == {name: expected[name] for name in stated}
    views = [*inputs["pixel_values"], *inputs.get("pixel_values_local", [])]
    compare_views(adapter, views, case["views"])
    return inputs


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("family", "mode"), MODES)
def test_every_mode_of_deepseek_ocr_answers_as_its_release(
    deepseek: Mapping[str, Path], family: str, mode: str
) -> None:
    adapter = deepseek_adapter(deepseek[family], family, mode)
    cases = [case for case in vectors(family)["cases"] if case["mode"] == mode]
    assert cases
    for case in cases:
        inputs = compare_pages(adapter, case, still(case["seed"], *case["size"]))
        compare_answer(adapter, inputs, case, LOOSER if family == "deepseek_ocr2" else TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode"), [("deepseek_ocr", "gundam"), ("deepseek_ocr2", "release")]
)
def test_several_pictures_are_laid_out_as_in_the_vllm_code_of_deepseek_ocr(
    deepseek: Mapping[str, Path], family: str, mode: str
) -> None:
    case = vectors(family)["several"]
    bound = {"max_patches": case["max_crops"]} if "max_crops" in case else {}
    adapter = deepseek_adapter(deepseek[family], family, mode, **bound)
    compare_pages(adapter, case, *(still(*picture) for picture in case["pictures"]))


# ---------------------------------------------------------------------- InternVL2

#: The library's type of each text stack.
TYPES = {"qwen2": "qwen2", "internlm2": "llama", "phi3": "phi3"}


def converted_internvl(folder: Path, stack: str) -> ModelSpec:
    """Convert a tiny release; `_6b` has the norms of InternViT-6B, `_long` goes beyond Phi-3's first context."""
    entry, family = vectors("internvl2")["stacks"][stack], stack.split("_")[0]
    (source := folder / "release").mkdir()
    write_release(source, entry["config"], entry["tensors"])
    write_tokenizer(source, family)
    write_format(source, entry["config"]["template"], PHI3 if family == "phi3" else CHATML)
    convert_internvl.convert(source, folder / "out", lambda line: None)
    spec = small({"model_type": TYPES[family]}, attention_bias=stack != "internlm2_6b")
    vocabulary = entry["config"]["llm_config"]["vocab_size"]
    return replace(
        spec,
        facts=replace(spec.facts, text=TEXT, vocabulary=vocabulary),
        path=folder / "out",
        weights="trained",
        conversation="internvl2_phi3" if family == "phi3" else None,
    )


@pytest.mark.sampled
@pytest.mark.parametrize("stack", ["qwen2", "internlm2", "internlm2_6b", "phi3", "phi3_long"])
def test_every_stack_of_internvl2_answers_as_its_release(tmp_path: Path, stack: str) -> None:
    spec = converted_internvl(tmp_path, stack)
    for case in vectors("internvl2")["stacks"][stack]["cases"]:
        if case["kind"] == "video":
            adapter = load_adapter(replace(spec, video=VideoSpec(case["frames"], "centre")))
            parts: list[Any] = [film(tmp_path, case["media"], *case["size"], 4)]
        else:
            adapter = load_adapter(spec)
            parts = [still(*picture) for picture in case["media"]]
        inputs = adapter.encode([watch("What is the word in this picture?", *parts)])
        compare_ids(inputs["input_ids"][0], case["ids"])
        assert len(inputs["pixel_values"]) == sum(case["tiles"])
        compare_views(adapter, inputs["pixel_values"], case["views"])
        compare_answer(adapter, inputs, case)


# ---------------------------------------------------------------------- LLaVA-Video


@pytest.fixture(scope="module")
def llava_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny release of LLaVA-Video."""
    table, source = vectors("llava_video"), tmp_path_factory.mktemp("release")
    write_release(source, table["config"], table["tensors"])
    byte_tokenizer().save_pretrained(source)
    return source


@pytest.mark.sampled
@pytest.mark.parametrize("case", vectors("llava_video")["cases"], ids=lambda case: case["name"])
def test_llava_video_answers_as_its_release(llava_video: Path, tmp_path: Path, case: Any) -> None:
    """At the real 27 x 27 patches of 14 pixels; `force_sample` of the release is the rule `uniform`."""
    rule = "uniform" if case["force_sample"] else "fps_then_uniform"
    timed = "release" if case["timed"] else False
    spec = tiny_spec(
        "llava_video",
        text=TEXT,
        tower=StackFacts(2, 32, 48, 16, 16, 2, gated=False, causal=False),
        class_attention="mean",
        video=VideoSpec(case["frames"], rule, rate=1.0),
        processor={"video_pooling": case["pooling"], "time_instruction": timed},
        architecture={
            **SIGLIP,
            "vision": {**SIGLIP["vision"], "image_size": 384, "patch_size": 14},
        },
        path=llava_video,
        weights="trained",
    )
    adapter = load_adapter(spec)
    path = film(tmp_path, case["video"], *case["size"], 24)
    inputs = adapter.encode([watch("Please describe this video in detail.", path)])
    holder = {case["placeholder"]: adapter.model.config.video_token_id}
    ids = [[holder.get(token, token), count] for token, count in case["ids"]]
    compare_ids(inputs["input_ids"][0], ids)
    assert adapter.layout(inputs).special == (case["newlines"],)
    compare_views(adapter, inputs["pixel_values_videos"][0], case["views"])
    compare_answer(adapter, inputs, case)


# ---------------------------------------------------------------------- LLaVA-OneVision-1.5


@pytest.fixture(scope="module")
def onevision1_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny release with its own classes named in config.json, and a processor that takes frames in pairs."""
    table, folder = vectors("llava_onevision1_5"), tmp_path_factory.mktemp("release")
    code = {"AutoConfig": "configuration_llavaonevision1_5.Llavaonevision1_5Config"}
    write_release(folder, {**table["config"], "auto_map": code}, table["tensors"])
    images = Qwen2VLImageProcessor(temporal_patch_size=1)
    Qwen2_5_VLProcessor(images, byte_tokenizer(), Qwen2VLVideoProcessor()).save_pretrained(folder)
    return folder


def onevision1_5_spec(folder: Path) -> ModelSpec:
    bounds = {"min_pixels": 3136, "max_pixels": 20000}
    return tiny_spec(
        "llava_onevision1_5",
        text=replace(TEXT, head_dim=16),
        tower=StackFacts(2, 32, 64, 4, 4, 8, gated=False, causal=False),
        projector=(128, 128, 32),
        processor={**bounds, "video_min_pixels": 784, "video_max_pixels": 8000},
        path=folder,
        weights="trained",
    )


@pytest.mark.parametrize(
    "case", vectors("llava_onevision1_5")["cases"], ids=lambda case: case["name"]
)
def test_llava_onevision1_5_answers_as_its_release(
    onevision1_5: Path, tmp_path: Path, case: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pictures, texts alone, and frames of a video after a picture, without a prompt to run the release's classes."""
    spec = onevision1_5_spec(onevision1_5)
    parts: list[Any] = [still(*picture) for picture in case["pictures"]]
    if frames := case.get("frames"):
        spec = replace(spec, video=VideoSpec(len(frames), "uniform"))
        parts.append(film(tmp_path, "a", *case["size"], 8))
    adapter = load_adapter(spec)
    assert "custom code" not in capsys.readouterr().out
    inputs = adapter.encode([watch("What is the word in this picture?", *parts)])
    compare_ids(inputs["input_ids"][0], case["ids"])
    for name, grid in case["grids"].items():
        assert inputs[name].tolist() == grid
    for name, levels in case["levels"].items():
        assert (inputs[name].double().mean(1) - torch.tensor(levels)).abs().max() < 2e-5
    compare_answer(adapter, inputs, case)
