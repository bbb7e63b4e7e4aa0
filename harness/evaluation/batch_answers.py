"""Answer a batch of requests, and find the samples that make it fail."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from threading import Lock
from time import perf_counter
from traceback import clear_frames
from typing import Any

import torch
from lmms_eval.api.instance import Instance
from torch import Tensor

from espalier.harness.cost.memory import DeviceMemory, peak_memory
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.errors import EngineEnded, UserError
from espalier.harness.evaluation.data_sources import AllowedSources
from espalier.harness.evaluation.prefetch import ReadingTimes
from espalier.harness.evaluation.prompt_text import Messages, chat_of
from espalier.harness.evaluation.samples import (
    Failure,
    Sample,
    journal_media,
    journal_question,
    json_value,
)
from espalier.harness.kinds.kind import OpenMethod, Prepare
from espalier.harness.media.images import complete_only
from espalier.harness.models.chat_media import Chat
from espalier.harness.specs.generation import ENDS, Settings, cut, spoken
from espalier.harness.store.answer_digest import Key
from espalier.methods.base import MethodError

log = logging.getLogger(__name__)

#: How an adapter names a chat of its batch; error lines of a sample name the sample instead.
CHAT = re.compile(r"\bchat \d+ of the batch(?P<aside>: )?")


@dataclass(frozen=True)
class Prepared:
    """A batch that has been read and encoded.

    Attributes:
        inputs: the model's inputs, or a prompt made from them.
        contexts: question, target and media of each sample, as the journal keeps them.
        seconds: duration of reading and preprocessing.
    """

    inputs: Any
    contexts: Sequence[Mapping[str, Any] | None]
    seconds: float


@dataclass
class Answerer:
    """Answers batches of requests and finds the samples that cannot be answered.

    Attributes:
        opened: the generator of answers, and the adapter of its model.
        seed: the run's seed, from which batches are seeded when the model samples.
        document: returns the document of (task, split, doc id).
        source: returns the name of (task, split, doc id) in its data set and the target of its document, for the
            journal; None: the journal keeps answers only.
        wording: returns a chat of (chat, document, task, doc id) with the text that replaces the task's question.
        needs_media: whether every sample must show a picture or a video.
        borders: where media may come from; None: from anywhere.
        kept: whether records have the kept tokens.
        reading: times of reading and preprocessing so far.
        refusal: the first error that is caused by the input and would repeat.
    """

    opened: OpenMethod
    seed: int
    document: Callable[[str, str, int], Any]
    source: Callable[[str, str, int, Any], tuple[str, Any]] | None = None
    wording: Callable[..., Messages] = lambda messages, *_sample: messages
    needs_media: bool = False
    borders: AllowedSources | None = None
    kept: bool = False
    reading: ReadingTimes = field(default_factory=ReadingTimes)
    refusal: UserError | None = None
    # Only one thread at a time may use a benchmark's functions and data.
    _lock: Lock = field(default_factory=Lock)

    def answer(
        self,
        block: Sequence[Instance],
        group: Settings,
        next_batch: Callable[[], Prepared | None] = lambda: None,
    ) -> tuple[list[Sample], list[Failure]]:
        """Answer a batch; if that raises, answer its samples one by one to find those to blame.

        `next_batch` returns the batch if it was read ahead, else None, and raises what reading it raised.

        Raises:
            EngineEnded: the program that answers in the harness's place has ended.
        """
        try:
            started = perf_counter()
            batch = next_batch()
            if batch is not None:
                batch = replace(batch, inputs=self.opened.adapter.to_device(batch.inputs))
            batch = batch or self.read(block)
            waited = perf_counter() - started
            with self.seeded(block, group):
                generated = self.opened.generator.generate(
                    batch.inputs, sample_names(block), **group.generate
                )
            samples = self.samples(block, group, batch, generated)
            self.reading += ReadingTimes(len(block), batch.seconds, waited)
            return samples, []
        except EngineEnded as error:
            # No other sample would get an answer.
            raise EngineEnded(
                f"{error}; finished samples are saved, the same command continues"
            ) from error
        except (Exception, SystemExit) as error:
            # One sample can break the batch by its file, its size or its memory; some tasks call sys.exit.
            log.debug("batch of %d failed", len(block), exc_info=True)
            if len(block) == 1:
                failure = Failure.from_exception(key_of(block[0]), error)
                line = CHAT.sub(lambda mark: "" if mark["aside"] else "the chat", failure.error)
                failure = replace(failure, error=line)
                if isinstance(error, UserError | MethodError) and self.refusal is None:
                    self.refusal = UserError(str(failure))
                    if isinstance(error, MethodError) and error.__cause__ is not None:
                        # For callers of `evaluate`; its frames hold the tensors of the batch.
                        clear_frames(error.__cause__.__traceback__)
                        self.refusal.__cause__ = error
                return [], [failure]
        # Outside the handler, so that the traceback's tensors are freed before the next try.
        results = [self.answer([request], group) for request in block]
        return (
            [sample for samples, _ in results for sample in samples],
            [failure for _, failures in results for failure in failures],
        )

    @contextmanager
    def seeded(self, block: Sequence[Instance], group: Settings) -> Iterator[None]:
        """Seed torch by batch if `generate` samples, which it does from the global generator; restore it afterwards."""
        if not group.generate["do_sample"]:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(self.seed * 1_000_003 + key_of(block[0])[1])
            yield

    def samples(
        self,
        block: Sequence[Instance],
        group: Settings,
        batch: Prepared,
        generated: GeneratedBatch,
    ) -> list[Sample]:
        """Return the samples of a batch from its answers."""
        return [
            Sample(
                task=key[0],
                doc_id=key[1],
                answer=cut(text, group.until),
                input_tokens=record.visual + record.text,
                output_tokens=record.new_tokens,
                record=replace(record, kept_tokens=tuple(record.origin.tolist()))
                if self.kept and record.origin is not None
                else record,
                raw=text,
                context=context,
                reasoning=self._reasoning_tokens(ids[: record.new_tokens], text),
                scores_all=group.thinking.scores_all,
            )
            for key, text, ids, record, context in zip(
                map(key_of, block),
                self.opened.adapter.decode(generated.ids),
                generated.ids,
                generated.records,
                batch.contexts,
                strict=True,
            )
        ]

    def _reasoning_tokens(self, ids: Tensor, text: str) -> int:
        """Return the tokens of an answer up to the end of its reasoning. Cost: O(log T) decodings if there is any."""
        answer = spoken(text)
        if answer == text:
            return 0
        ends = len(ENDS.findall(text))

        def holds_the_end(length: int) -> bool:
            return len(ENDS.findall(self.opened.adapter.decode(ids[None, :length])[0])) >= ends

        if not answer:
            return len(ids)
        return 1 + bisect_left(range(1, len(ids)), True, key=holds_the_end)

    def read(self, block: Sequence[Instance]) -> Prepared:
        """Load and encode the documents of a batch; any exception passes through."""
        return self._prepared(block, encode=self.opened.encode)

    def preparer(self) -> Callable[[Sequence[Instance], Callable[[], None]], Prepared]:
        """Return `read` for another thread; it calls its second argument between samples."""
        return partial(self._prepared, encode=self.opened.preparer())

    def _prepared(
        self,
        block: Sequence[Instance],
        pause: Callable[[], None] = lambda: None,
        *,
        encode: Prepare,
    ) -> Prepared:
        """Load the documents of a batch, write their chats and encode them."""
        with self._lock, complete_only():
            started = perf_counter()
            chats, contexts = [], []
            for request in block:
                pause()
                document = self._read(request)
                chats.append(self._messages(request, document))
                contexts.append(self._context(request, document, chats[-1]))
            pause()
            return Prepared(encode(chats), contexts, perf_counter() - started)

    def chat(self, request: Instance) -> Chat:
        """Return the chat of a sample, as the model gets it."""
        with self._lock, complete_only():
            return self._messages(request, self._read(request))

    def _read(self, request: Instance) -> Any:
        _, _, _, doc_id, task, split = request.args
        return self.document(task, split, doc_id)

    def _messages(self, request: Instance, document: Any) -> Chat:
        task, doc_id = key_of(request)
        try:
            messages = request.args[1](document)
        except (AttributeError, TypeError) as error:
            empty_columns = [name for name, value in document.items() if value is None]
            if not empty_columns:
                raise
            raise ValueError(
                f"columns without a value: {', '.join(empty_columns)} ({type(error).__name__}: {error})"
            ) from error
        chat = chat_of(self.wording(messages, document, task, doc_id))
        if self.borders is not None:
            chat = self.borders.chat(chat)
        turns = [turn["content"] for turn in chat if not isinstance(turn["content"], str)]
        if self.needs_media and all(part["type"] == "text" for turn in turns for part in turn):
            raise ValueError(
                "the sample has no picture and no video; valid: benchmark.media=optional, which answers it as a text"
            )
        return chat

    def _context(self, request: Instance, document: Any, chat: Chat) -> dict[str, Any] | None:
        """Return question, target and media of a sample for the journal."""
        if self.source is None:
            return None
        task, doc_id = key_of(request)
        source, target = self.source(task, request.args[5], doc_id, document)
        return {
            "question": journal_question(chat),
            "target": json_value(target),
            "media": journal_media(chat, source),
        }


def key_of(request: Instance) -> Key:
    """Return a sample's identity: chat requests carry (context, to_messages, settings, doc id, task, split)."""
    return (request.args[4], int(request.args[3]))


def sample_names(block: Sequence[Instance]) -> list[str]:
    """Return the id of each sample of a batch, as records have it."""
    return [f"{task}/{doc_id}" for task, doc_id in map(key_of, block)]


#: Sizes 1, 2, 4, ... up to this are tried; beyond it a step is bound by arithmetic, not by memory traffic.
LARGEST = 64

#: Share of the memory that a batch may use; the remainder is for longer samples and fragmentation.
SHARE = 0.9


def largest_batch(
    peak_of: Callable[[int], int | None], base: int, room: Callable[[], int], cap: int
) -> int:
    """Return the largest of 1, 2, 4, ... <= `cap` that fits; 1 if nothing does.

    `peak_of` runs a batch of a size and returns the peak in bytes, None if it fails; `base` are the bytes in use
    before, and `room` returns those that the process may use in total.

    A size is tried only if the line through the two previous peaks stays below `SHARE` of the room, so that no trial
    has to be killed. Cost: one batch of each size tried.
    """
    size, fitting, peaks = 1, 0, [base]
    while size <= max(cap, 1):
        peak = peak_of(size)
        if peak is None:
            break
        peaks.append(peak)
        slope = max(peaks[-1] - peaks[-2], 0) / (size - fitting)
        fitting, size = size, 2 * size
        if peak + slope * fitting > SHARE * room():
            break
    return max(fitting, 1)


def find_batch_size(
    answerer: Answerer,
    groups: Iterable[tuple[Settings, list[Instance]]],
    device: str,
    share: int = 1,
) -> int:
    """Return the largest batch that fits, by answering the requests with the longest prompts; answers are dropped.

    Args:
        answerer: encodes and generates.
        groups: requests by their settings; those with the longest answers are tried. A request that cannot be encoded
            does not count: the run reports it.
        device: the device that limits memory.
        share: number of processes on this machine, which divide its free memory.
    """
    # Denoised answers without a limit all have the model's length.
    group, requests = max(groups, key=lambda item: int(item[0].generate.get("max_new_tokens", 0)))
    memory = DeviceMemory(device, share)
    # The text needs no image to be loaded; the sort is stable, so ties keep the run's order.
    longest = sorted(requests, key=lambda request: -len(str(request.args[0])))
    candidates, batch = _sound(answerer, longest), list[Instance]()

    def peak(size: int) -> int | None:
        batch.extend(islice(candidates, size - len(batch)))
        if len(batch) < size:
            return None
        try:
            with peak_memory(memory.device) as peak:
                inputs = answerer.read(batch).inputs
                with answerer.seeded(batch, group):
                    answerer.opened.generator.generate(
                        inputs, sample_names(batch), **group.generate
                    )
        except (Exception, SystemExit) as error:
            # The run meets the error again, where it is blamed on a sample.
            reason = "out of memory" if ran_out(error) else type(error).__name__
            log.info("batch of %d not possible: %s", size, reason)
            return None
        return peak.bytes

    size = largest_batch(peak, memory.used(), memory.reachable, min(LARGEST, len(requests)))
    batch.clear()
    memory.tidy()
    with peak_memory(memory.device):
        pass  # it resets the peak: the run reports its own
    return size


def _sound(answerer: Answerer, requests: Iterable[Instance]) -> Iterator[Instance]:
    for request in requests:
        with suppress(Exception, SystemExit):  # the run reports it
            answerer.read([request])
            yield request


def ran_out(error: BaseException) -> bool:
    """Return whether an error means that a device, torch's CPU allocator or Python ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def journalled_batch_size(entries: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the batch size that a journal holds."""
    sizes = (entry["batch_size"] for entry in entries if "batch_size" in entry)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)
