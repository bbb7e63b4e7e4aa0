"""One pass over a benchmark for several runs: a batch is read and seen by the tower once, then each run goes its way.

A batch is read and encoded, brought to the decoder's entry, and from there through the layers that at least two runs
leave as they are (`espalier.harness.engine.shared_prompt`). Each run that lacks one of its samples then answers it as
it would by
itself, from that prompt, and journals the answer without times. Nothing is scored, and no failure is kept: afterwards
each run is carried out as always, finds its journal complete, or meets again what failed here and says so itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lmms_eval.api.instance import Instance

from espalier.harness.cost.free_memory import DeviceMemory
from espalier.harness.engine.shared_prefill import untouched
from espalier.harness.engine.shared_prompt import carried_on, shared_prompt
from espalier.harness.evaluation.batch_answers import Prepared, key_of
from espalier.harness.evaluation.chat_model import HOPELESS, Answered, ChatModel
from espalier.harness.evaluation.lmms_requests import ask, served
from espalier.harness.evaluation.samples import Journal, Key, Sample, finished
from espalier.harness.kinds.chat_answerer import Joined
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.ranks import Ranks
from espalier.harness.specs.generation import Settings
from espalier.harness.specs.run_spec import RunSpec
from espalier.methods.base import Method, TokenReducer

if TYPE_CHECKING:
    from espalier.harness.engine.artifacts.priors import Prior
    from espalier.harness.evaluation.evaluate import Progress
    from espalier.harness.evaluation.lmms_tasks import Loaded
    from espalier.harness.models.adapter import Adapter

log = logging.getLogger(__name__)

#: The layers that are run once may take this share of the memory that is free when the pass begins.
ROOM = 0.25


@dataclass
class Sharer:
    """A run that takes part.

    Attributes:
        spec: the run, as admitted.
        method: its method, as admitted.
        journal: where its answers go.
        prior: the calibrated prior, for methods that need one.
        done: samples that it has.
        fresh: how many of them this pass gave, in this process.
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
        """What shortens its prompts."""
        found = kind_of(self.method, self.spec).prompt_reducer(self.method)
        assert found is not None  # others do not take part (harness/kinds/one_pass.py)
        return found

    @property
    def leaves(self) -> int:
        """How many decoder layers run as in the unreduced model."""
        facts = self.spec.model.facts
        sites = self.reducer.all_sites(facts.tower.layers, facts.text.layers)
        return untouched(sites, facts.text.layers)

    def lacks(self, block: Sequence[Instance]) -> bool:
        """Say whether it is to answer a batch: one of which it has a part is answered again as a whole."""
        hopeless = self.failed >= HOPELESS and not self.done
        return not hopeless and any(key_of(request) not in self.done for request in block)

    def keep(self, samples: Sequence[Sample]) -> None:
        """Journal what is new, in one append, without the times of a pass that was not its own."""
        new = [one for one in samples if one.key not in self.done]
        untimed = [replace(one, record=replace(one.record, times_ms={})) for one in new]
        self.journal.append(*(one.entry() for one in untimed))
        self.done |= {one.key for one in new}
        self.fresh += len(new)


def answer_together(
    sharers: Sequence[Sharer],
    adapter: Adapter,
    loaded: Loaded,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Fill the journals of runs that differ in method and budget alone.

    Args:
        sharers: the runs.
        adapter: the model.
        loaded: the benchmark, from `open_benchmark`.
        progress: called with (answers given, all answers of this process).
        ranks: the processes that share the work, each in a call of its own.

    Raises:
        StoreLost: a journal cannot be written; all answers before are kept.
    """
    ranks = ranks or Ranks()
    model = Together(sharers, adapter, loaded, progress, ranks)
    with served(loaded):
        ask(model, loaded, sharers[0].spec)
    ranks.gather(None)  # the journals of all are complete when the first run reads its own


class Together(ChatModel):
    """Takes the requests of a benchmark as a run's model does, and answers them for several."""

    def __init__(
        self,
        sharers: Sequence[Sharer],
        adapter: Adapter,
        loaded: Loaded,
        progress: Progress | None,
        ranks: Ranks,
    ) -> None:
        """Take everything that answering needs; nothing is loaded here."""
        first = sharers[0]
        # Chats are encoded and ids decoded by the adapter alone; who generates is each run's own.
        reader = Joined(adapter, _Nobody())
        super().__init__(reader, first.journal, first.spec, loaded.tasks, progress, ranks)
        self._sharers = sharers
        self._adapter = adapter
        memory = DeviceMemory(first.spec.model.device, ranks.local_world)
        self._room = ROOM * (memory.reachable() - memory.used())

    def generate_until(self, requests: Sequence[Instance]) -> Any:
        """Answer all requests for all runs, and end the pass.

        Raises:
            Answered: always.
        """
        journals = [one.journal for one in self._sharers]
        known = self._ranks.first(lambda: [set(finished(one.entries())) for one in journals])
        for sharer, done in zip(self._sharers, known, strict=True):
            sharer.done |= done
        groups = self._groups(list({key_of(one): one for one in requests}.values()))
        pending = [
            (group, block)
            for group, block in self._blocks(groups)
            if any(sharer.lacks(block) for sharer in self._sharers)
        ]
        mine = self._ranks.share(pending)
        total = sum(len(block) * one.lacks(block) for _, block in mine for one in self._sharers)
        for group, block in mine:
            self._carry_out(block, group)
            if self._progress is not None:
                self._progress(sum(one.fresh for one in self._sharers), total)
        raise Answered

    def _carry_out(self, block: Sequence[Instance], group: Settings) -> None:
        """Answer a batch for every run that lacks it."""
        sharers = [one for one in self._sharers if one.lacks(block)]
        read = _tried(partial(self._prompt, block, group, sharers))
        for sharer in sharers:
            samples = None
            if read is not None:
                samples = _tried(partial(self._answers, read, block, group, sharer))
            if samples is None:
                sharer.failed += 1
            else:
                sharer.keep(samples)

    def _prompt(
        self, block: Sequence[Instance], group: Settings, sharers: Sequence[Sharer]
    ) -> Prepared:
        """Read a batch and bring it as far as at least two runs go together."""
        read = self._answerer.read(block)
        methods = [one.reducer for one in sharers]
        prompt = shared_prompt(self._adapter, read.inputs, methods, timed=False)
        depth = sorted((one.leaves for one in sharers), reverse=True)[1] if sharers[1:] else 0
        prompt = carried_on(self._adapter, prompt, depth, self._room, **group.generate)
        return replace(read, inputs=prompt)

    def _answers(
        self, read: Prepared, block: Sequence[Instance], group: Settings, sharer: Sharer
    ) -> list[Sample]:
        """Let a run answer a batch as it would by itself."""
        kind = kind_of(sharer.method, sharer.spec)
        with kind.open(sharer.spec, self._adapter, sharer.method, sharer.prior) as opened:
            return self._answerer.say(read, block, group, opened.responder)


class _Nobody:
    """Stands where a generator is asked for and none is used."""

    def generate(self, inputs: Any, samples: Sequence[str], **generation: Any) -> Any:
        """Refuse."""
        raise NotImplementedError("each run of a shared pass generates by itself")


def _tried(action: Callable[[], Any]) -> Any:
    """Return what an action returns, None if it fails."""
    try:
        return action()
    except (Exception, SystemExit):
        # Whatever goes wrong with a batch, each run meets it again by itself, where it is blamed on a sample.
        log.debug("a batch of a shared pass failed", exc_info=True)
        return None
