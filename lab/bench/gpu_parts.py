"""Parts of the GPU benchmark for token reduction: the engine on a large model, and selections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from espalier.harness.api.open_method import CheckedMethod, open_responder
from espalier.harness.cli import doctor
from espalier.harness.cost.bounds import copy_rate, step_bytes
from espalier.harness.cost.clock import Clock, drain
from espalier.harness.cost.memory import peak_memory
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.tools.doctor.machine_report import Check, NotHere, examine
from espalier.harness.tools.rehearsal.rehearse import NEW_TOKENS, prompt_of, rehearse
from espalier.methods.none import NoReduction
from lab.bench import engine_bench as bench_engine
from lab.bench.bench_setup import Figure, Setup
from lab.bench.engine_bench import METHODS, EngineInstance
from lab.bench.gpu_setup import Found, GpuPlan, Note, tried
from lab.bench.select_parts import ratio_row
from lab.bench.selection_times import (
    clock_of,
    configured_methods,
    in_rounds,
    product_of,
    questions,
    seconds_of,
)
from lab.bench.step_bandwidth import against_bandwidth
from lab.bench.synthetic_views import features

#: Out-of-memory errors: of torch on a GPU, of torch and Python elsewhere.
FULL = (torch.OutOfMemoryError, MemoryError)


def checks(plan: GpuPlan) -> Found:
    """Yield whether each thing that only a card can tell is as it should be."""
    card_checks: dict[str, Check] = {
        "attention kernels in bfloat16": partial(attention_kernels, plan.device),
        "phases timed by events": partial(phase_times, plan.device),
        "peak of a prompt against its rehearsal": partial(rehearsed_peak, plan),
    }
    for name, check in (*doctor.checks(DEFAULT_STORE), *card_checks.items()):
        finding = examine(name, check)
        text = f"{name}: {finding.status} in {finding.seconds:.1f} s: {finding.detail}"
        yield Note(text, failed=finding.status == "failed")


def attention_kernels(device: str) -> str:
    """Each kernel of attention that runs here gives what mathematics in single precision gives, with grouped heads."""
    query = torch.randn(1, 28, 512, 128, device=device, dtype=torch.bfloat16)
    key, value = torch.randn(2, 1, 4, 512, 128, device=device, dtype=torch.bfloat16)
    attend = partial(scaled_dot_product_attention, enable_gqa=True, is_causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        exact = attend(query.float(), key.float(), value.float())
    kernels = []
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ):
        try:
            with sdpa_kernel(backend):
                result = attend(query, key, value)
        except RuntimeError:  # torch has no kernel for these inputs
            continue
        distance = float((result - exact).abs().max())
        assert distance <= 0.05, f"{backend.name} differs by {distance:.1e}"
        kernels.append(f"{backend.name.lower()} within {distance:.0e}")
    if not kernels:
        raise NotHere("no fused kernel runs on this device")
    return ", ".join(kernels)


def phase_times(device: str) -> str:
    """Two phases end to end take as long as the host's clock shows."""
    square, clock = torch.randn(2048, 2048, device=device), Clock(device)
    square @ square
    drain(clock.cards)
    started = perf_counter()
    for name in ("first", "second"):
        with clock.phase(name):
            for _ in range(5):
                square @ square
    phases_ms = sum(clock.totals_ms().values())
    wall_ms = 1000 * (perf_counter() - started)
    text = f"{phases_ms:.1f} ms of {wall_ms:.1f} ms"
    assert 0.9 * wall_ms <= phases_ms <= wall_ms, text
    return text


def rehearsed_peak(plan: GpuPlan) -> str:
    """The peak of a prompt differs from that of its rehearsal by at most a tenth of what is beside the weights."""
    rehearsal = rehearse(*plan.target, "method=none", cards="1x80")
    (card,) = rehearsal.cards
    if plan.device == "cpu":
        raise NotHere("the memory of a process is not that of its tensors")
    adapter = load_adapter(replace(rehearsal.spec.model, device=plan.device))
    chat = prompt_of(rehearsal.spec.model, rehearsal.video_frames)
    checked = CheckedMethod(rehearsal.spec, NoReduction())
    with peak_memory(plan.device) as peak, open_responder(checked, adapter, None) as opened:
        opened.generator.generate(opened.encode([chat]), ["0"], max_new_tokens=NEW_TOKENS)
    used, expected = peak.bytes - card.weights, card.peak - card.weights
    text = f"{used / 2**20:.0f} MiB beside the weights, rehearsed {expected / 2**20:.0f}"
    assert abs(used - expected) <= 0.1 * expected, text
    return text


def engine(plan: GpuPlan) -> Found:
    """Yield the figures of the engine's benchmark, and decoding with its memory-bandwidth bound."""
    instance = EngineInstance.build((*plan.target, f"model.device={plan.device}"))
    yield from bench_engine.prefill(instance, plan.ratio, plan.rounds)
    yield from bench_engine.machinery(instance, plan.rounds)
    yield from bench_engine.memory(instance, plan.ratio)
    yield from decode(instance, plan)


def decode(instance: EngineInstance, plan: GpuPlan) -> Found:
    """Yield the time per token after the full and the reduced prompt, with the bandwidth bound.

    Uses the library's `generate` in a session, which copies its cache at every step.
    """
    rate = copy_rate(instance.adapter.device, plan.copied)
    yield Figure("decode", "bandwidth of a copy, read and written", rate / 1e9, "GB/s")
    weights = step_bytes(instance.adapter)
    runs = {
        "full": instance.reducer("method=none"),
        f"ratio {plan.ratio} at layer 2": instance.reducer(METHODS[0], f"ratio={plan.ratio}"),
    }
    for name, run in runs.items():
        instance.generate(run, plan.tokens)
        records = [instance.generate(run, plan.tokens) for _ in range(plan.answers)]
        times = [record.times_ms["decode_per_token"] for record in records]
        yield from against_bandwidth("decode", name, times, weights + records[0].kv_bytes, rate)


def select(plan: GpuPlan) -> Found:
    """Yield each method's selection time relative to the similarity product, at each size on the device, in fp32.

    The last size has one config per method. Configs that would take too long or do not fit are skipped and noted.
    """
    setup = Setup()
    names = plan.methods or configured_methods()
    specs = [(name, setup.spec(f"method={name}")) for name in names]
    small, before = 0, dict[str, float]()
    for size in plan.sizes:
        last = size == plan.sizes[-1] and len(plan.sizes) > 1
        chosen = [
            (name, s)
            for name, s in specs
            if not last or name.removesuffix("_official") == s.method.name
        ]
        yield from at_size(chosen, size, plan, before, small)
        small = size[0]


@torch.inference_mode()
def at_size(
    specs: Sequence[tuple[str, RunSpec]],
    size: tuple[int, int, int, int],
    plan: GpuPlan,
    before: dict[str, float],
    small: int,
) -> Found:
    """Yield the figures of one size. Views are built one method at a time, because some are as large as the product.

    Args:
        specs: configs by name.
        size: as in `GpuPlan.sizes`.
        plan: the run.
        before: milliseconds of each config at the size before, `small` tokens; replaced by those of this size.
        small: tokens of the size before.
    """
    n, width, share, repeats = size
    tokens = features(n, width).to(plan.device)
    product, clock = product_of(tokens), clock_of(tokens.device)
    seconds_of(product, clock)
    unit = 1e3 * median(seconds_of(product, clock) for _ in range(repeats))
    yield Figure("selection", f"the product itself, N={n} d={width}", unit, "ms")
    for spec in specs:
        name = spec[0]
        expected = before.get(name, 0.0) / 1e3 * (n / small) ** 2 if small else 0.0
        if expected > plan.longest:
            yield Note(f"{name} was not asked at N={n}: expected to take {expected:.0f} s")
        else:
            yield from tried(f"{name} at N={n}", of_method(spec, tokens, share, repeats, before))


@torch.inference_mode()
def of_method(
    spec: tuple[str, RunSpec], tokens: Tensor, share: int, repeats: int, before: dict[str, float]
) -> Found:
    """Yield the ratio of one config's selection time to the product, if it selects, and store its time in `before`."""
    n, width = tokens.shape[1:]
    try:
        selections = questions([spec], tokens, n // share)
        pairs = in_rounds(selections, product_of(tokens), repeats, clock_of(tokens.device))[0]
    except FULL:
        yield Note(f"{spec[0]} does not fit the memory at N={n}")
        return
    for selection in selections:
        row = ratio_row(selection, n, width, pairs[selection.name])
        before[selection.name] = row.ms
        name = f"{row.name}, N={n} d={width} keep={row.keep}: {row.ms:.3g} ms"
        yield Figure("selection", name, row.ratio, "x", row.quartiles)
