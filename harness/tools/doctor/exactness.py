"""Is what this machine computes right? The embedded model on one device, against itself without the harness."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from torch import Tensor

from espalier.harness.config.build_spec import specs_of
from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.decoding_record import DecodingRecord
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.runs import admission
from espalier.harness.runs.single_run import CellRunner
from espalier.harness.seedling.scene_questions import questions_for
from espalier.harness.seedling.scenes import Scenes
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import AnswerSpec, Backend, EngineSpec, MethodSpec
from espalier.harness.store.files.digests import Digests
from espalier.harness.tools.calibration.calibration_images import question
from espalier.harness.tools.doctor.machine_report import GIB, NotHere
from espalier.harness.tools.rehearsal.rehearse import rehearse

SETTINGS = {"do_sample": False, "max_new_tokens": 24, "output_logits": True}

#: One method a kind of place: tower output, before the decoder, between its layers.
METHODS = ("visionzip", "divprune", "fastv")

#: New tokens of the answer to a longest prompt.
LONGEST_ANSWER = 16

#: Largest difference of sums in another order, relative to the largest logit: single precision, any kernels.
TOLERANCE = 1e-4


def job_of(*overrides: str) -> admission.Job:
    """Return the checked job of a command line on the embedded model."""
    return admission.admit(
        specs_of("model=seedling", "benchmark=seedling_caption", *overrides)[0], Digests()
    )


@cache
def model_on(*overrides: str) -> Adapter:
    """Return the embedded model, loaded once for each way of loading it."""
    return load_adapter(job_of("method=none", *overrides).spec.model)


def chats(count: int = 3) -> list[list[dict[str, Any]]]:
    """Return chats about held-out scenes: questions of different lengths, so that a batch is padded."""
    kinds = ("caption", "attr", "count")[:count]
    scenes = [Scenes().scene("test", 0, index) for index in range(len(kinds))]
    return [
        question(scene.to_pil(), questions_for(scene, {kind: 1})[0].text)
        for scene, kind in zip(scenes, kinds, strict=True)
    ]


def plain(adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Return ids (B, T) and logits (B, T, V) of transformers' own generation."""
    inputs = adapter.encode(chats())
    with torch.inference_mode():
        done = adapter.model.generate(**inputs, **SETTINGS, return_dict_in_generate=True)
    return done.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(done.logits, 1)


def reduced(
    adapter: Adapter, method: str, ratio: float, backend: Backend = "drop"
) -> GeneratedBatch:
    """Answer the same chats with a method."""
    built, engine = build_method(method, {}), EngineSpec(backend=backend)
    answer_spec = AnswerSpec(adapter.spec, MethodSpec(method), Budget("kept", ratio), engine)
    with kind_of(built, answer_spec).open(answer_spec, adapter, built) as opened:
        inputs = opened.encode(chats())
        names = [str(number) for number in range(len(inputs["input_ids"]))]
        return opened.generator.generate(inputs, names, **SETTINGS)


def ratio_zero(device: str) -> str:
    """Ratio 0 of each kind of method gives the plain model's logits to the bit."""
    adapter = model_on(f"model.device={device}")
    _, logits = plain(adapter)
    for method in METHODS:
        reached = reduced(adapter, method, 0.0).logits
        assert reached is not None
        assert torch.equal(reached, logits), (
            f"{method}: logits differ by {_span(reached - logits):.1e}"
        )
    return f"{', '.join(METHODS)}: {logits.shape[0]} answers equal to the bit"


def drop_as_emulated(device: str) -> str:
    """Dropping tokens gives what masking them gives."""
    adapter, widest = model_on(f"model.device={device}"), 0.0
    for method in METHODS:
        fast, slow = (reduced(adapter, method, 0.8, backend) for backend in get_args(Backend))
        assert fast.logits is not None
        assert slow.logits is not None
        assert torch.equal(fast.ids, slow.ids), f"{method}: answers differ"
        widest = max(widest, _span(fast.logits - slow.logits) / _span(slow.logits))
    assert widest <= TOLERANCE, f"logits differ by {widest:.1e} of the largest"
    return f"{', '.join(METHODS)}: same answers, logits within {widest:.0e} of the largest"


def same_answers(overrides: Sequence[str], reference: Sequence[str]) -> str:
    """A model loaded one way answers as the same model loaded another way."""
    ids, _ = plain(model_on(*overrides))
    expected, _ = plain(model_on(*reference))
    assert torch.equal(ids.cpu(), expected.cpu()), "answers differ"
    return f"{len(ids)} answers equal those on {' '.join(reference)}"


def speculative(device: str, transport: str, *settings: str) -> str:
    """Check that a draft changes no answer and that none is abandoned."""
    overrides = [f"model.device={device}", f"method.draft_options={{device: {device}}}", *settings]
    job = job_of("method=pearl", *overrides, f"engine.transport={transport}")
    adapter = model_on(f"model.device={device}")
    with kind_of(job.method, job.spec).open(job.spec, adapter, job.method) as opened:
        for index, chat in enumerate(chats()):
            inputs = opened.encode([chat])
            done = opened.generator.generate(
                inputs, [str(index)], do_sample=False, max_new_tokens=24
            )
            decoding = done.records[0].decoding
            assert decoding is not None
            decoded = DecodingRecord.from_entry(decoding)
            assert decoded.mismatch is None, f"answer {index} differs at {decoded.mismatch}"
            assert decoded.degraded is None, f"answer {index}: {decoded.degraded}"
    return f"{len(chats())} answers of pearl equal plain decoding, transport {transport}"


def flash(device: str) -> str:
    """FlashAttention gives close to what sdpa gives."""
    if find_spec("flash_attn") is None:
        raise NotHere("the package flash_attn is not installed")
    half = ("model.dtype=bfloat16", f"model.device={device}")
    _, logits = plain(model_on(*half, "model.attention=flash_attention_2"))
    _, expected = plain(model_on(*half, "model.attention=sdpa"))
    difference = logits[:, 0].float().cpu() - expected[:, 0].float().cpu()
    distance = _span(difference) / _span(expected[:, 0])
    assert distance <= 0.03, f"first logits differ by {distance:.1e} of the largest"
    return f"first logits within {distance:.0e} of the largest"


def longest_shape(overrides: Sequence[str]) -> str:
    """Answer a prompt of the length that the benchmark's longest may have, on random weights of the real sizes."""
    tokens = specs_of("model.weights=random", *overrides)[0].model.longest - LONGEST_ANSWER
    shape = (f"benchmark.prompt_tokens={tokens}", f"benchmark.new_tokens={LONGEST_ANSWER}")
    with TemporaryDirectory() as store:
        job = admission.admit(
            specs_of(
                *("model.weights=random", *overrides, "benchmark=latency", *shape),
                *("method=none", "engine.paired=0", "engine.batch_size=1", f"store={store}"),
            )[0],
            Digests(),
        )
        row, _ = CellRunner().run(job, [job])
    peak = row["memory"]["peak_bytes"] / 2**30
    return f"a prompt of {tokens:,} tokens and {LONGEST_ANSWER} new ones: peak {peak:.1f} GiB"


def rehearsed(overrides: Sequence[str], cards: str) -> str:
    """A prompt of the run fits on simulated cards."""
    rehearsal = rehearse(*overrides, cards=cards)
    peaks = ", ".join(f"{card.peak / GIB:.1f}" for card in rehearsal.cards)
    sizes = f"peaks of {peaks} GiB on cards of {rehearsal.room / GIB:.0f}"
    assert rehearsal.fits, f"{sizes}, at most {rehearsal.batch} rows"
    return sizes


def _span(tensor: Tensor) -> float:
    return tensor.abs().max().item()
