"""Answers of vLLM with the plug-in, compared with the harness's own engine: `make test-serve`, not an everyday test.

All prompts of a cell are in flight at once, read in pieces that split pictures. Caches of prefixes, of
encoded pictures and of processed ones are on, and each cell is answered twice, so that the second turn comes out of
them. One process loads model after model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import espalier
from espalier.harness.cost.budget import Budget
from espalier.harness.engine.session import Session
from espalier.harness.errors import EngineEnded, UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.runs.served.engine_pool import code_folder, model_folder
from espalier.harness.runs.served.engine_process import EngineProcess, engine_version
from espalier.harness.runs.served.served_session import ServedGenerator, WrongPrompt, served_prompts
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import AnswerSpec, EngineSpec, MethodSpec
from espalier.methods.base import MethodError
from espalier.serve.families import PLAIN
from espalier.serve.setting import KEY
from tests.serve.families import FAMILIES
from tests.serve.running_server import PYTHON
from tests.serve.second_runner import add_interpreter
from tests.tiny import chat, load_tiny, picture, save_tiny

#: Which of vLLM's model runners; the second one takes minutes for each cell.
RUNNER = os.environ.get("SERVE_RUNNER", "1")

#: Steps of fewer tokens than the prompts in flight have, so that pictures are split, and every cache.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 160,
    "block_size": 32,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "mm_processor_cache_gb": 0.1,
}

#: Method, ratio, positions.
CELLS = (
    ("none", 0.0, "original"),
    ("divprune", 0.0, "original"),
    *((name, 0.75, "original") for name in ("random", "uniform", "pooled", "divprune", "cdpruner")),
    *((name, 0.75, "original") for name in ("fastervlm", "visionzip", "hired", "rtprune")),
    *((name, 0.5, "original") for name in ("evs", "vidcom2")),
    ("divprune", 0.75, "renumbered"),
)

#: Logits that differ by less are a tie, which the rounding of another kernel decides.
TIE = 1e-3

NEW = 12


@dataclass(frozen=True)
class Side:
    """A model under test in this process, and its chats."""

    adapter: Adapter
    chats: tuple[list[dict], ...]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    if not PYTHON.exists():
        pytest.exit(f"no vLLM: {PYTHON} does not exist", returncode=1)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    code = code_folder(tmp_path_factory.mktemp("code") / "path")
    if RUNNER == "2":
        os.environ.update(add_interpreter(code, engine_version(PYTHON)))
    with closing(EngineProcess(PYTHON, code)) as running:
        yield running


@pytest.fixture(scope="module", params=("seedling", *FAMILIES))
def side(
    request: pytest.FixtureRequest, engine: EngineProcess, tmp_path_factory: pytest.TempPathFactory
) -> Side:
    return loaded(request.param, engine, tmp_path_factory.mktemp(request.param))


def loaded(
    name: str, engine: EngineProcess, folder: Path, plain: bool = False, **options: Any
) -> Side:
    """The model in this process and in the engine, there in vLLM's class as it is if `plain`."""
    if name == "seedling":
        with espalier.load(name).open_adapter() as adapter:
            side = Side(adapter, scenes(8))
    else:
        family = FAMILIES[name]
        spec = replace(family.spec, path=save_tiny(family.spec, folder / "checkpoint"))
        side = Side(load_tiny(spec, folder / "checkpoint", "float32"), family.chats)
    place = model_folder(folder / "model", side.adapter.spec, side.adapter)
    plain_class = {"architectures": [PLAIN + type(side.adapter.model).__name__]}
    options["hf_overrides"] = plain_class if plain else {KEY: {}}
    engine.load({"model": str(place), **OPTIONS, **options})
    return side


def scenes(count: int) -> tuple[list[dict], ...]:
    questions = ("is there a red ring ?", "where is the ring ?")
    return tuple(
        chat(questions[n % 2], picture(n, 12, 12).resize((96, 96), 0)) for n in range(count)
    )


def request_of(adapter: Adapter, name: str, ratio: float, positions: Any) -> AnswerSpec:
    return AnswerSpec(
        model=adapter.spec,
        method=MethodSpec(name),
        budget=Budget("kept", ratio),
        engine=EngineSpec(positions=positions),
    )


def served(
    engine: EngineProcess, spec: AnswerSpec, side: Side, built_in: bool = False
) -> list[list[int]]:
    """Answers of all chats, sent together."""
    method = build_method(spec.method.name, {})
    generator = ServedGenerator(spec, side.adapter, method, engine, built_in)
    inputs = served_prompts(side.adapter, side.chats)
    names = [f"sample/{number}" for number in range(len(side.chats))]
    result = generator.generate(inputs, names, max_new_tokens=NEW, do_sample=False)
    rows = zip(result.ids.tolist(), result.records, strict=True)
    return [ids[: record.new_tokens] for ids, record in rows]


def harness_answers(spec: AnswerSpec, side: Side) -> tuple[list[list[int]], list[Tensor]]:
    """Answers of the harness's engine, prompt by prompt, and the logits (T, V) of each."""
    method = build_method(spec.method.name, {})
    # Of InternVL's videos each frame would be an item.
    several = sum(part["type"] != "text" for part in side.chats[0][0]["content"]) > 1
    session = Session(
        side.adapter,
        method,
        spec.budget,
        positions=spec.engine.positions,
        scope="item" if several else "prompt",
    )
    answers, logits = [], []
    with session:
        for number, single in enumerate(side.chats):
            inputs, names = side.adapter.encode([single]), [f"sample/{number}"]
            result = session.generate(
                inputs, names, max_new_tokens=NEW, do_sample=False, output_logits=True
            )
            answers.append(result.ids[0, : result.records[0].new_tokens].tolist())
            logits.append(result.logits[0])
    return answers, logits


def same(answer: list[int], expected: list[int], logits: Tensor) -> bool:
    """Whether two answers are equal up to the first tie of the harness's own logits."""
    if answer == expected:
        return True
    if answer == expected[: len(answer)] or expected == answer[: len(expected)]:
        return False
    step = next(n for n, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b)
    return float((logits[step, expected[step]] - logits[step, answer[step]]).abs()) < TIE


@pytest.mark.parametrize(("name", "ratio", "positions"), CELLS)
def test_answers_equal_those_of_the_harness(
    engine: EngineProcess, side: Side, name: str, ratio: float, positions: str
) -> None:
    if positions == "renumbered" and side.adapter.facts.rotary_axes > 1:
        pytest.skip("positions on several axes have no renumbered form")
    if build_method(name, {}).needs_frames() and "video" not in str(side.chats):
        pytest.skip("the method compares frames")
    spec = request_of(side.adapter, name, ratio, positions)
    try:
        expected, logits = harness_answers(spec, side)
    except (UserError, MethodError) as error:  # windows of a tower, crops that are not stitched
        with pytest.raises(UserError, match=r"espalier\.method"):
            served(engine, spec, side)
        print(f"refused by both: {error}", end=" ")
        return
    assert len({tuple(answer) for answer in expected}) > 1
    for _ in range(2):
        answers = served(engine, spec, side)
        equal = [*map(same, answers, expected, logits)]
        print(f"equal {sum(map(list.__eq__, answers, expected))} of {len(answers)}", end=" ")
        assert all(equal), (answers, expected)


@pytest.mark.parametrize("family", ["seedling", "qwen2_5_vl", "qwen3_vl"])
def test_a_compiled_engine_answers_as_the_harness_does(
    engine: EngineProcess, tmp_path: Path, family: str
) -> None:
    """Decoder and encoder compiled, and graphs of the encoder asked for: hooks of `fastervlm` still run."""
    options = {
        "enforce_eager": False,
        "compilation_config": {"compile_mm_encoder": True, "cudagraph_mm_encoder": True},
        # On processors it would compile the encoder for training, and the first picture ends the engine.
        "skip_mm_profiling": True,
    }
    side = loaded(family, engine, tmp_path, **options)
    for name, ratio in (("none", 0.0), ("divprune", 0.75), ("fastervlm", 0.75)):
        spec = request_of(side.adapter, name, ratio, "original")
        expected, logits = harness_answers(spec, side)
        answers = served(engine, spec, side)
        print(f"{name} {sum(map(list.__eq__, answers, expected))} of {len(answers)}", end=" ")
        assert all(map(same, answers, expected, logits)), (answers, expected)


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen2_5_vl_video", "evs"), ("qwen3_vl_video", "evs"), ("qwen3_vl_video", "vidcom2")],
)
def test_pruning_of_vllm_keeps_as_many_tokens(
    engine: EngineProcess, tmp_path: Path, family: str, name: str
) -> None:
    """Its positions differ, so its answers are only counted; each prompt's length is checked in every answer."""
    options = {
        "video_pruning_rate": 0.5,
        "video_pruning_method": name,
        "enable_prefix_caching": False,  # its answers change after a prefix hit
    }
    side = loaded(family, engine, tmp_path, True, **options)
    spec = request_of(side.adapter, name, 0.5, "original")
    spec = replace(spec, budget=replace(spec.budget, down=True))
    first, second = (served(engine, spec, side, built_in=True) for _ in range(2))
    expected, _ = harness_answers(spec, side)
    print(f"equal {sum(map(list.__eq__, first, expected))} of {len(first)}", end=" ")
    assert first == second
    assert len({tuple(answer) for answer in first}) > 1


def test_without_the_setting_in_the_keys_a_picture_comes_stale_out_of_the_caches(
    tmp_path: Path,
) -> None:
    """The negative control: the keys of vLLM alone, which a second plug-in puts back."""
    code = code_folder(tmp_path / "code")
    (record,) = code.glob("*.dist-info")
    points = record / "entry_points.txt"
    points.write_text(points.read_text(encoding="utf-8") + "stale = stale_keys:forget\n", "utf-8")
    (code / "stale_keys.py").write_text(
        "from contextlib import contextmanager\n"
        "def forget():\n"
        "    from espalier.serve.processor import PrunedProcessor\n"
        "    requested = PrunedProcessor.requested\n"
        "    @contextmanager\n"
        "    def keyless(*arguments):\n"
        "        with requested(*arguments):\n"
        "            yield ''\n"
        "    PrunedProcessor.requested = keyless\n",
        encoding="utf-8",
    )
    with closing(EngineProcess(PYTHON, code)) as engine:
        side = loaded("seedling", engine, tmp_path)
        served(engine, request_of(side.adapter, "none", 0.0, "original"), side)
        with pytest.raises(WrongPrompt, match="the engine read"):
            served(engine, request_of(side.adapter, "divprune", 0.75, "original"), side)


def test_what_cannot_be_served_is_one_line_and_the_engine_goes_on(
    engine: EngineProcess, side: Side
) -> None:
    prompt = served_prompts(side.adapter, side.chats[:1])["prompts"][0]
    request = {"prompt": prompt.ids, "media": prompt.media, "sampling": {"max_tokens": 1}}
    for setting, line in (
        ({"method": "fastv", "ratio": 0.5}, "acts before decoder layer 2"),
        ({"method": "divprune", "ratio": 1}, "espalier.ratio=1 is out of range"),
    ):
        with pytest.raises(UserError, match=line):
            engine.ask([{**request, "setting": setting}])
    long = served_prompts(side.adapter, [chat("w1 " * OPTIONS["max_model_len"], 0)])
    (prompt_over,) = long["prompts"]
    over = {**request, "prompt": prompt_over.ids, "media": prompt_over.media, "setting": {}}
    with pytest.raises(UserError, match=r"backend=vllm: .*(length|longer)"):
        engine.ask([over])
    (answer,) = engine.ask([{**request, "setting": {"method": "divprune", "keep": 2}}])
    assert answer["prompt"] == prompt.text + 2 * len(prompt.visual)


def test_an_engine_that_dies_is_named(engine: EngineProcess) -> None:
    """The last test: it ends the engine."""
    engine._child.kill()
    with pytest.raises(EngineEnded, match="the engine of backend=vllm ended with -9"):
        engine.ask([])
