"""lmms-eval asks a chat model all requests of a benchmark, and scores what it says."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lmms_eval.evaluator import simple_evaluate

from espalier.harness.evaluation.chat_model import Answered, ChatModel
from espalier.harness.evaluation.data_errors import named_data
from espalier.harness.evaluation.lmms_tasks import Loaded, quiet
from espalier.harness.evaluation.sandbox import tokens_remembered
from espalier.harness.evaluation.unreadable_letters import without_guesses
from espalier.harness.ranks import alone
from espalier.harness.specs.run_spec import RunSpec


@contextmanager
def served(loaded: Loaded) -> Iterator[None]:
    """Hold what `ask` needs around it; a model that has nothing more to do leaves the block by `Answered`."""
    with (
        named_data(loaded.tasks),
        alone(),
        quiet(),
        tokens_remembered(),
        loaded.serving(),
        without_guesses(),
        suppress(Answered),
    ):
        yield


def ask(model: ChatModel, loaded: Loaded, spec: RunSpec) -> Any:
    """Return what lmms-eval says of a model on the run's benchmark."""
    return simple_evaluate(
        model=model,
        tasks=list(loaded.tasks),
        task_manager=loaded.manager,
        limit=spec.benchmark.limit,
        batch_size=model.batch_size,
        # The response cache of lmms-eval stores nothing before a run ends; the journal is ours.
        use_cache=None,
        cache_requests=False,
        # Standard errors are computed from the samples (harness/evaluation/metric_scores.py).
        bootstrap_iters=0,
        log_samples=True,
        process_docs_parallel=1,
        # The other back end would create an Accelerator and its global state in every process.
        distributed_executor_backend="torchrun",
        cli_args=argparse.Namespace(
            process_with_media=False, output_path=str(spec.store), reasoning_tags=None
        ),
    )
