"""The sides of `lab.bench.peer_bench`: a user's ways to answer the same questions with the same weights.

Run as a file by the interpreter of each environment, with the weights and a folder of questions: each line of standard
input names a side, and a line of JSON answers it. Each side imports what it needs, since no environment has all of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import transformers
from PIL import Image

#: Longest answer, and entries that each layer and head keeps.
NEW_TOKENS, KEPT = 32, 48

#: Presses with the rule of a method: their arguments, the method's, and the last entries that its ratio leaves out.
PRESSES: dict[str, tuple[dict[str, int], dict[str, Any], int]] = {
    "SnapKVPress": (
        {"window_size": 4, "kernel_size": 5},
        {"method": "snapkv", "repeated": False, "window": 4, "kernel": 5},
        4,
    ),
    "TOVAPress": ({}, {"method": "tova"}, 1),
    "KeyDiffPress": ({}, {"method": "keydiff"}, 1),
}

#: A benchmark one answer at a time, as lmms-eval's class takes it.
RUN = (
    *("model=seedling", "benchmark=seedling_rec", "method=none", "json=false"),
    *("engine.batch_size=1", "engine.paired=0", "engine.warmup=0"),
)

#: Pictures with their questions; all prompts have one length.
Questions = list[tuple[Image.Image, str]]


def timed(
    questions: Questions, model: Any, answer: Callable[..., tuple[str, int]]
) -> dict[str, Any]:
    """Return answers and times: a question's first call of the model is its prefill, all that follows its decoding."""
    marks: list[float] = []
    handles = [
        register(lambda *_: marks.append(perf_counter()))
        for register in (model.register_forward_pre_hook, model.register_forward_hook)
    ]
    texts, prefills, steps, started = [], [], [], perf_counter()
    for picture, question in questions:
        marks.clear()
        text, count = answer(picture, question)
        texts.append(text.strip())
        prefills.append(marks[1] - marks[0])
        steps.append((perf_counter() - marks[1]) / (count - 1))
    seconds = perf_counter() - started
    for handle in handles:
        handle.remove()
    times = {"prefill_ms": median(prefills) * 1e3, "decode_ms": median(steps) * 1e3}
    return {"per_second": len(texts) / seconds, **times, "answers": texts}


def slots(cache: Any, short_cache: Any) -> list[list[int]]:
    """Return for each layer and head the slots of a cache with the keys that its shortened copy holds."""
    return [
        torch.cdist(kept, keys).argmin(1).sort().values.tolist()
        for before, after in zip(cache.layers, short_cache.layers, strict=True)
        for kept, keys in zip(after.keys[0], before.keys[0], strict=True)
    ]


def run_library(weights: str, questions: Questions, press_name: str = "") -> dict[str, Any]:
    """Transformers: `generate`, or a press of kvpress and steps as in its pipeline, which takes no pictures."""
    processor = transformers.AutoProcessor.from_pretrained(weights)
    # The weights lie in half precision, which processors compute slowly; every side computes in single.
    load = transformers.LlavaForConditionalGeneration.from_pretrained
    model = load(weights, dtype=torch.float32).eval()

    def encoded(picture: Image.Image, question: str) -> Any:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        chat = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        return processor(images=picture, text=text, return_tensors="pt")

    def generated(*question: Any) -> tuple[str, int]:
        inputs = encoded(*question)
        rows = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        ids = rows[0, inputs["input_ids"].shape[1] :]
        return processor.decode(ids, skip_special_tokens=True), len(ids)

    if not press_name:
        return timed(questions, model, generated)
    import kvpress

    press = getattr(kvpress, press_name)(**PRESSES[press_name][0])
    length = encoded(*questions[0])["input_ids"].shape[1]
    press.compression_ratio = 1 - (KEPT + 0.5) / length  # it keeps the whole part

    def prefilled(inputs: Any, pressed: bool = True) -> tuple[Any, Any]:
        cache = transformers.DynamicCache()
        with press(model) if pressed else nullcontext():
            output = model(**inputs, past_key_values=cache, logits_to_keep=1)
        return output.logits[0, -1].argmax(), cache

    def stepped(*question: Any) -> tuple[str, int]:
        token, cache = prefilled(encoded(*question))
        ids = [token]
        while int(token) != model.generation_config.eos_token_id and len(ids) < NEW_TOKENS:
            place = torch.tensor([[length + len(ids) - 1]])
            step = model(input_ids=token.view(1, 1), past_key_values=cache, position_ids=place)
            token = step.logits[0, -1].argmax()
            ids.append(token)
        return processor.decode(ids, skip_special_tokens=True), len(ids)

    result = timed(questions, model, stepped)
    inputs = [encoded(*question) for question in questions]
    caches = [[prefilled(each, pressed)[1] for pressed in (False, True)] for each in inputs]
    return {**result, "kept": [slots(*pair) for pair in caches]}


def run_espalier(_weights: str, questions: Questions, press_name: str = "") -> dict[str, Any]:
    """The project's `ask`, without a method or with that of a press."""
    import espalier
    from espalier.harness.api.questions import question_chat
    from espalier.harness.engine.kv_cache import answer_cache

    model = espalier.load("seedling", device="cpu")
    settings: dict[str, Any] = {"method": "none"}
    with model.open_adapter() as adapter:
        encoded = [adapter.encode([question_chat(*pair, model.spec)]) for pair in questions]
    if press_name:
        _, settings, stay = PRESSES[press_name]
        length = encoded[0]["input_ids"].shape[1]
        ratio = 1 - (KEPT - stay) / (length - stay)
        settings = {**settings, "scope": "prompt", "ratio": ratio}
    with espalier.apply(model, **settings) as pruned:

        def answer(*question: Any) -> tuple[str, int]:
            reply = pruned.ask(*question, max_new_tokens=NEW_TOKENS)
            return reply.text, reply.tokens

        def cache_of(session: Any, inputs: Any) -> Any:
            cache = answer_cache(adapter.decoder)
            session.prefilled(inputs, cache)
            return cache

        result, sessions = timed(questions, adapter.model, answer), pruned._opened.paired
        if press_name and sessions is not None:
            caches = [
                [cache_of(side, inputs) for side in (sessions.plain, sessions.reduced)]
                for inputs in encoded
            ]
            result["kept"] = [slots(*pair) for pair in caches]
    return result


def run_lmms(weights: str, questions: Questions) -> dict[str, Any]:
    """A benchmark by lmms-eval's own model class, from its data to scores."""
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.models.chat.llava_hf import LlavaHf

    from espalier.harness.config.build_spec import specs_of
    from espalier.harness.evaluation.evaluate import open_benchmark
    from espalier.harness.evaluation.lmms_tasks import scoring

    model = LlavaHf(weights, device="cpu", dtype="float32", device_map="cpu")
    (spec,), started = specs_of(*RUN, f"limit={len(questions)}"), perf_counter()
    loaded = open_benchmark(spec)
    with scoring(loaded):
        results = simple_evaluate(model=model, **loaded.arguments(spec))
    (scores,), seconds = results["results"].values(), perf_counter() - started
    return {"per_second": len(questions) / seconds, "score": scores["acc_at_50,none"]}


def run_benchmark(_weights: str, questions: Questions) -> dict[str, Any]:
    """The same benchmark by the project, to the committed row."""
    from espalier.harness.config.build_spec import specs_of
    from espalier.harness.runs.runner import Runner

    with TemporaryDirectory() as store:
        runner = Runner()
        runner.admit(specs_of(*RUN, f"limit={len(questions)}", f"store={store}"))
        (cell,) = runner.admitted
        runner.pool.adapter(cell.spec.model)
        started = perf_counter()
        runner.run(cell)
        seconds = perf_counter() - started
    (row,) = runner.rows
    return {"per_second": len(questions) / seconds, "score": row["metrics"]["acc_at_50"]["value"]}


RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "transformers": run_library,
    "kvpress": run_library,
    "espalier": run_espalier,
    "lmms-eval": run_lmms,
    "espalier-run": run_benchmark,
}


def serve(weights: str, folder: Path) -> None:
    """Print the figures of each side that a line names, with the peak of the process meanwhile."""
    texts = json.loads((folder / "questions.json").read_text())
    pictures = [Image.open(folder / f"{number}.png").convert("RGB") for number in range(len(texts))]
    for line in sys.stdin:
        side, *rule = line.split()
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        with torch.no_grad(), redirect_stdout(sys.stderr):
            figures = RUNS[side](weights, list(zip(pictures, texts, strict=True)), *rule)
        peak = Path("/proc/self/status").read_text(encoding="utf-8").split("VmHWM:")[1].split()[0]
        print(json.dumps({**figures, "peak_mib": int(peak) / 1024}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(sys.argv[1], Path(sys.argv[2]))
