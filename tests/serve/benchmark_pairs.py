"""Every benchmark with every served method through vLLM, against rows of the harness's engine: `make test-serve`.

One tiny Qwen2.5-VL sees pictures and videos. Its engine stays open from benchmark to benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import run
from espalier.harness.runs import single_run
from espalier.harness.runs.served.engine_pool import EnginePool
from espalier.harness.specs.catalogue import build_method
from espalier.harness.store import Store
from espalier.serve.setting import served
from tests.benchmarks.conftest import _cache, repositories  # noqa: F401
from tests.benchmarks.runs import RUN, arguments
from tests.serve.equal_answers import PYTHON
from tests.serve.families import FAMILIES
from tests.tasks.media_tasks import tiny_model
from tests.tiny import save_tiny

METHODS = served()

ENGINE = (
    *("backend=vllm", f"backend.python={PYTHON}", "+backend.options.enforce_eager=true"),
    "+backend.options.gpu_memory_utilization=0.4",
)


#: Those that vLLM refuses for pictures.
OF_FRAMES = {name for name in METHODS if build_method(name, {}).needs_frames()}


#: Half of the tokens; of `cdpruner` a quarter, since its last picks of a half lie within the rounding of fp32: on a
#: picture of noise 2e-8 of the first one apart.
RATIOS = {0.5: ",".join({*METHODS} - {"cdpruner"}), 0.75: "cdpruner"}


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    pool = EnginePool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that choose the tiny model."""
    spec = FAMILIES["qwen2_5_vl"].spec
    with torch.random.fork_rng():
        torch.manual_seed(0)
        folder = save_tiny(spec, tmp_path_factory.mktemp("model"))
    return tiny_model("qwen2_5_vl_7b", spec, folder)


@pytest.mark.parametrize("name", RUN)
def test_rows_have_the_answers_of_the_harness(
    name: str,
    repositories: Callable[[str], Path],  # noqa: F811
    pool: EnginePool,
    model: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(single_run, "EnginePool", lambda: pool)
    monkeypatch.setattr(EnginePool, "close", lambda pool: None)  # from command to command
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    root, answers = repositories(name), []
    for backend, own in (("transformers", ()), ("vllm", ENGINE)):
        store = tmp_path / backend
        words = arguments(name, root, store)
        line = [word for word in words if not word.startswith(("model", "++model"))]
        line += [*model, *own, "engine.scope=item", "refused=skip", "-m"]
        for ratio, methods in RATIOS.items():
            run.main([*line, f"ratio={ratio}", f"method={methods}"])  # 2 where a method is refused
        rows = Store(store).rows()
        answers.append({row["method"]: row["extra"]["answers"] for row in rows})
    ours, theirs = answers
    different = [method for method in theirs if theirs[method] != ours.get(method)]
    refused = set(METHODS) - set(theirs)
    print(f"{name}: {len(theirs) - len(different)} of {len(theirs)} equal, refused {refused}")
    # `hired` reads a layer of the tower that attends in windows.
    assert refused - {"hired"} in (set(), OF_FRAMES)
    assert not different
