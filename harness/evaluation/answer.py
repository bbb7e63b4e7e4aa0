"""Requests through the engine: one batch in, its answers out, and the samples to blame when it fails."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from lmms_eval.api.instance import Instance
from lmms_eval.protocol import ChatMessages
from PIL import ImageFile

from harness.errors import UserError
from harness.evaluation import kept
from harness.evaluation.samples import Failure, Key, Sample
from harness.evaluation.wording import Wording
from harness.generation import Settings, cut
from harness.kinds.base import Responder
from methods.base import MethodError

log = logging.getLogger(__name__)

#: How an adapter names a chat of its batch; outside, samples have names of their own.
CHAT = re.compile(r"\bchat \d+ of the batch(?P<aside>: )?")


#: Messages of one sample.
Chat = list[dict[str, Any]]


class Answerer:
    """Answers batches of requests and finds out which of their samples cannot be answered.

    Args:
        responder: what answers, already open.
        seed: of the run; batches that sample are seeded by it.
        document: returns the document of (task, split, doc id).
        source: returns what (task, split, doc id) is called in its data set, and the target of its document, for the
            journal; None: the journal keeps answers alone.
        wording: what replaces the tasks' own questions; None: nothing.
        shown: whether every sample must show a picture or a video.
    """

    def __init__(
        self,
        responder: Responder,
        seed: int,
        document: Callable[[str, str, int], Any],
        source: Callable[[str, str, int, Any], tuple[str, Any]] | None = None,
        wording: Wording | None = None,
        shown: bool = False,
    ) -> None:
        self._responder = responder
        self._seed = seed
        self._document = document
        self._source = source
        self._wording = wording or Wording(None, {})
        self._shown = shown
        #: The first refusal: input that cannot work, not an accident.
        self.refusal: UserError | None = None

    def attempt(
        self, block: Sequence[Instance], group: Settings
    ) -> tuple[list[Sample], list[Failure]]:
        """Answer a batch; if it raises, answer its samples one by one to find those to blame."""
        try:
            return self.answer(block, group), []
        except (Exception, SystemExit) as error:
            # Anything can go wrong with one sample (its file, its size, memory), and some tasks
            # even call sys.exit.
            log.debug("batch of %d failed", len(block), exc_info=True)
            if len(block) == 1:
                failure = _blame(key_of(block[0]), error)
                if isinstance(error, UserError | MethodError) and self.refusal is None:
                    self.refusal = UserError(str(failure))
                return [], [failure]
        # Outside the handler: the tensors that the traceback held are free before the next try.
        parts = [self.attempt([request], group) for request in block]
        return [s for samples, _ in parts for s in samples], [f for _, bad in parts for f in bad]

    def answer(self, block: Sequence[Instance], group: Settings) -> list[Sample]:
        """Answer a batch; raises whatever goes wrong."""
        keys = [key_of(request) for request in block]
        documents, chats, inputs = self._encoded(block)
        names = [f"{task}/{doc_id}" for task, doc_id in keys]
        if group.generate["do_sample"]:
            # `generate` samples from torch's global generator: seed it by batch, leave no trace.
            with torch.random.fork_rng():
                torch.manual_seed(self._seed * 1_000_003 + keys[0][1])
                generated = self._responder.generate(inputs, names, **group.generate)
        else:
            generated = self._responder.generate(inputs, names, **group.generate)
        texts = self._responder.decode(generated.ids)
        return [
            Sample(
                task=key[0],
                doc_id=key[1],
                answer=cut(text, group.until),
                input_tokens=record.visual + record.text,
                output_tokens=record.new_tokens,
                record=record,
                raw=text,
                asked=self._asked(request, document, chat),
            )
            for key, text, record, request, document, chat in zip(
                keys, texts, generated.records, block, documents, chats, strict=True
            )
        ]

    def encode(self, block: Sequence[Instance]) -> Mapping[str, Any]:
        """Load the documents of a batch and return the model's inputs; raises whatever goes wrong."""
        return self._encoded(block)[2]

    def _encoded(
        self, block: Sequence[Instance]
    ) -> tuple[list[Any], list[Chat], Mapping[str, Any]]:
        """Return the documents of a batch, their chats and the model's inputs."""
        with _whole_images():
            documents = [self._read(request) for request in block]
            chats = [
                self._messages(request, document)
                for request, document in zip(block, documents, strict=True)
            ]
            return documents, chats, self._responder.encode(chats)

    def told(self, request: Instance) -> dict[str, str | None]:
        """Return what a row says of prompts, by the example of a request."""
        with _whole_images():
            return self._responder.told(self._messages(request, self._read(request)))

    def _read(self, request: Instance) -> Any:
        _, _, _, doc_id, task, split = request.args
        return self._document(task, split, doc_id)

    def _messages(self, request: Instance, document: Any) -> Chat:
        task, doc_id = key_of(request)
        try:
            messages = request.args[1](document)
        except (AttributeError, TypeError) as error:
            empty = [name for name, value in document.items() if value is None]
            if not empty:
                raise
            raise ValueError(
                f"columns without a value: {', '.join(empty)} ({type(error).__name__}: {error})"
            ) from error
        messages = self._wording.of(messages, document, task, doc_id)
        chat: Chat = ChatMessages(messages=messages).to_hf_messages()
        if self._shown and not shows(chat):
            raise ValueError(
                "the sample shows no picture and no video; valid: benchmark.media=optional, which answers it as a text"
            )
        return chat

    def _asked(self, request: Instance, document: Any, chat: Chat) -> dict[str, Any] | None:
        """Return what the journal keeps of a sample beside its answer."""
        if self._source is None:
            return None
        task, doc_id = key_of(request)
        source, target = self._source(task, request.args[5], doc_id, document)
        return {
            "question": kept.question(chat),
            "target": kept.plain(target),
            "media": kept.media(chat, source),
        }


def shows(chat: Chat) -> bool:
    """Whether a chat has a picture or a video."""
    turns = [turn["content"] for turn in chat if not isinstance(turn["content"], str)]
    return any(part["type"] != "text" for turn in turns for part in turn)


def key_of(request: Instance) -> Key:
    """Return a sample's identity: chat requests carry (context, to_messages, settings, doc id, task, split)."""
    return (request.args[4], int(request.args[3]))


def _blame(key: Key, error: BaseException) -> Failure:
    failure = Failure.from_exception(key, error)
    return Failure(*key, CHAT.sub(lambda m: "" if m["aside"] else "the chat", failure.error))


@contextmanager
def _whole_images() -> Iterator[None]:
    """Let a truncated image file raise: lmms-eval tells PIL to fill it with grey, a wrong answer in the making."""
    with mock.patch.object(ImageFile, "LOAD_TRUNCATED_IMAGES", False):
        yield
