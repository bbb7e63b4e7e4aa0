"""One pass over a benchmark for several runs, which share reading and the vision tower.

A batch is read and encoded, brought to the decoder's entry, and from there through the layers that at least two runs
leave unchanged (`espalier.harness.engine.session`). Each run that lacks one of its samples then answers it from
that prompt and journals the answer without times. Nothing is scored, and no failure is kept: afterwards each run is
carried out as usual and finds its journal complete, or meets the failure again and reports it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lmms_eval.api.instance import Instance
from lmms_eval.evaluator import simple_evaluate

from espalier.harness.cost.memory import DeviceMemory
from espalier.harness.engine.priors import Prior
from espalier.harness.engine.session import prompt_with_trunk, shared_prompt
from espalier.harness.engine.sites import unreduced_layers
from espalier.harness.evaluation.batch_answers import Prepared, key_of, sample_names
from espalier.harness.evaluation.chat_model import HOPELESS, AllAnswered, ChatModel
from espalier.harness.evaluation.evaluate import Progress
from espalier.harness.evaluation.lmms_tasks import LoadedBenchmark, scoring
from espalier.harness.evaluation.samples import Sample, finished_samples
from espalier.harness.kinds.kind import OpenMethod
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.models.adapter import Adapter
from espalier.harness.ranks import Ranks
from espalier.harness.specs.generation import Settings
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.answer_digest import Key
from espalier.harness.store.files.journal import Journal
from espalier.methods.base import Method, TokenReducer

log = logging.getLogger(__name__)

#: Share of the memory free at the start of the pass that states of shared layers may take.
ROOM = 0.25


@dataclass
class SharedRun:
    """A run that takes part in a shared pass.

    Attributes:
        spec: the run, as admitted.
        method: its method, as admitted.
        journal: receives its answers.
        prior: the calibrated prior, for methods that need one.
        done: samples that it has.
        fresh: number of samples that this pass added, in this process.
        failed: batches that it could not answer here.
    """

    spec: RunSpec
    method: Method
    journal: Journal
    prior: Prior | None = None
    done: set[Key] = field(default_factory=set)
    fresh: int = 0
    failed: int = 0

    @property
    def reducer(self) -> TokenReducer:
        """The method that shortens its prompts."""
        reducer = kind_of(self.method, self.spec).prompt_reducer(self.method)
        assert reducer is not None  # others do not take part (harness/runs/onepass.py)
        return reducer

    @property
    def leaves(self) -> int:
        """The number of decoder layers that run as in the unreduced model."""
        facts = self.spec.model.facts
        sites = self.reducer.all_sites(facts.tower.layers, facts.text.layers)
        return unreduced_layers(sites, facts.text.layers)

    def lacks(self, block: Sequence[Instance]) -> bool:
        """Return whether it has to answer a batch; a batch that it has in part is answered again as a whole."""
        hopeless = self.failed >= HOPELESS and not self.done
        return not hopeless and any(key_of(request) not in self.done for request in block)

    def keep(self, samples: Sequence[Sample]) -> None:
        """Journal new samples with one append, without times: those of a shared pass are not the run's."""
        new = [sample for sample in samples if sample.key not in self.done]
        untimed = [replace(sample, record=replace(sample.record, times_ms={})) for sample in new]
        self.journal.append(*(sample.entry() for sample in untimed))
        self.done |= {sample.key for sample in new}
        self.fresh += len(new)


def answer_together(
    sharers: Sequence[SharedRun],
    adapter: Adapter,
    loaded: LoadedBenchmark,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Fill the journals of runs that differ only in method and budget.

    Args:
        sharers: the runs.
        adapter: the model.
        loaded: the benchmark, from `open_benchmark`.
        progress: called with (answers given, all answers of this process).
        ranks: the processes that share the work; each calls this function.

    Raises:
        StoreLost: a journal cannot be written; all answers before are kept.
    """
    ranks = ranks or Ranks()
    model = SharedPassModel(sharers, adapter, loaded, progress, ranks)
    with scoring(loaded), suppress(AllAnswered):
        simple_evaluate(model=model, **loaded.arguments(sharers[0].spec))
    ranks.gather(None)  # the journals of all are complete when the first run reads its own


class SharedPassModel(ChatModel):
    """Answers the requests of a benchmark for several runs."""

    def __init__(
        self,
        sharers: Sequence[SharedRun],
        adapter: Adapter,
        loaded: LoadedBenchmark,
        progress: Progress | None,
        ranks: Ranks,
    ) -> None:
        """Keep the arguments; nothing is loaded here."""
        first = sharers[0]
        # The adapter encodes chats and decodes ids for all runs; each run generates by itself.
        super().__init__(
            OpenMethod(_NoGenerator(), adapter),
            first.journal,
            first.spec,
            loaded.tasks,
            progress,
            ranks,
        )
        self._sharers = sharers
        self._adapter = adapter
        memory = DeviceMemory(first.spec.model.device, ranks.local_world)
        self._room = ROOM * (memory.reachable() - memory.used())

    def generate_until(self, requests: Sequence[Instance]) -> Any:
        """Answer all requests for all runs, and end the pass.

        Raises:
            AllAnswered: always.
        """
        finished_keys = self._ranks.first(
            lambda: [set(finished_samples(run.journal.entries())) for run in self._sharers]
        )
        for sharer, keys in zip(self._sharers, finished_keys, strict=True):
            sharer.done |= keys
        groups = self._groups(list({key_of(run): run for run in requests}.values()))
        pending = self._pending(
            groups, lambda block: any(sharer.lacks(block) for sharer in self._sharers)
        )
        batches = self._ranks.share(pending)
        total = sum(len(block) * run.lacks(block) for _, block in batches for run in self._sharers)
        for group, block in batches:
            self._carry_out(block, group)
            self._progress(sum(run.fresh for run in self._sharers), total)
        raise AllAnswered

    def _carry_out(self, block: Sequence[Instance], group: Settings) -> None:
        """Answer a batch for every run that lacks it."""
        sharers = [run for run in self._sharers if run.lacks(block)]
        batch = _tried(partial(self._prompt, block, group, sharers))
        for sharer in sharers:
            answers = partial(self._answers, batch, block, group, sharer)
            samples = None if batch is None else _tried(answers)
            if samples is None:
                sharer.failed += 1
            else:
                sharer.keep(samples)

    def _prompt(
        self, block: Sequence[Instance], group: Settings, sharers: Sequence[SharedRun]
    ) -> Prepared:
        """Read a batch and run it through the layers that at least two runs share."""
        batch = self._answerer.read(block)
        prompt = shared_prompt(
            self._adapter, batch.inputs, [run.reducer for run in sharers], timed=False
        )
        depth = sorted((run.leaves for run in sharers), reverse=True)[1] if sharers[1:] else 0
        prompt = prompt_with_trunk(self._adapter, prompt, depth, self._room, **group.generate)
        return replace(batch, inputs=prompt)

    def _answers(
        self, batch: Prepared, block: Sequence[Instance], group: Settings, sharer: SharedRun
    ) -> list[Sample]:
        """Return one run's answers to a batch."""
        kind = kind_of(sharer.method, sharer.spec)
        with kind.open(sharer.spec, self._adapter, sharer.method, sharer.prior) as opened:
            with self._answerer.seeded(block, group):
                generated = opened.generator.generate(
                    batch.inputs, sample_names(block), **group.generate
                )
            return self._answerer.samples(block, group, batch, generated)


class _NoGenerator:
    """The generator of a shared pass, which is never called."""

    def generate(self, inputs: Any, samples: Sequence[str], **generation: Any) -> Any:
        """Raise NotImplementedError."""
        raise NotImplementedError("each run of a shared pass generates by itself")


def _tried(action: Callable[[], Any]) -> Any:
    """Return the result of an action, None if it fails."""
    try:
        return action()
    except (Exception, SystemExit):
        # Each run meets the error again by itself, where it is blamed on a sample.
        log.debug("a batch of a shared pass failed", exc_info=True)
        return None
