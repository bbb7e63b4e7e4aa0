"""A method on a model for the length of a `with`: questions go in, answers come out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch

from espalier.harness.api.answer import Answer, decoding_of, flops_of
from espalier.harness.api.argument_errors import in_words_of_python, reworded
from espalier.harness.api.loaded_models import Model
from espalier.harness.api.open_method import Settled, opened
from espalier.harness.api.questions import is_chat, single, whole
from espalier.harness.api.sample_names import identities
from espalier.harness.api.visible_tokens import rows_of, seen_by, without_chats
from espalier.harness.engine.engine_guards import check_generation
from espalier.harness.engine.record import Record
from espalier.harness.errors import UserError
from espalier.harness.kinds.checks.generation_check import check_settings
from espalier.harness.kinds.kind import Responder
from espalier.harness.models.chat_media import Chat
from espalier.harness.settings import Count, read_value
from espalier.harness.specs.generation import cut, settings
from espalier.methods.base import MethodError

#: Longest answer unless a call says otherwise.
NEW_TOKENS = 128


class Applied:
    """A method on a model, as `apply` returns it: a context manager, inside which questions are answered.

    Args:
        settled: the method, checked.
        model: the model.
        draft: the loaded draft model, if there is one.
    """

    def __init__(self, settled: Settled, model: Model, draft: Model | None) -> None:
        self._settled = settled
        self._model = model
        self._draft = draft
        self._stack: ExitStack | None = None

    def __repr__(self) -> str:
        """Say what is applied to what."""
        spec = self._settled.spec
        return f"<{self._settled.method!r} on {spec.model.name}, {spec.budget.rule} ratio {spec.budget.ratio:g}>"

    def __enter__(self) -> Applied:
        """Install the method on the model.

        Raises:
            UserError: the model's attention or layers are not supported, or the draft does not go with it.
        """
        if self._stack is not None:
            raise RuntimeError("this `with` is open already; apply(...) anew for another")
        with ExitStack() as stack, plain_errors():
            self._adapter = stack.enter_context(self._model.opened())
            draft = None if self._draft is None else stack.enter_context(self._draft.opened())
            self._responder: Responder = stack.enter_context(
                opened(self._settled, self._adapter, draft)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the model back as it was."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    # ------------------------------------------------------------------ questions

    def ask(
        self,
        media: Any,
        question: Any = None,
        *,
        max_new_tokens: int = NEW_TOKENS,
        batch_size: int = 8,
        **generation: Any,
    ) -> Any:
        """Ask about pictures, a video or nothing.

        Args:
            media: what stands before the words: a PIL image, a path, an array (H, W, 3) of uint8; the path of a video
                or `espalier.video(frames)`; a list of these; None. Or a whole chat in place of media and question, a
                list of turns with `role` and `content`.
            question: a text; or a list of texts about the same media, for a list of answers.
            max_new_tokens: longest answer.
            batch_size: questions of a list that are answered at once.
            **generation: what transformers' `generate` takes: `do_sample`, `temperature`, `num_beams` and so on.
                `until`: strings that cut the answer off.

        Returns:
            Answer, or a list of them if `question` is a list.

        Raises:
            UserError: something that cannot be opened, answered or honoured; one line.
        """
        spec = self._model.spec
        with plain_errors():
            if is_chat(media):
                if question is not None:
                    raise UserError(
                        "question: a whole chat holds its question already; valid: ask(chat) alone"
                    )
                chats = [whole(media, spec)]
            else:
                asked = question if isinstance(question, list | tuple) else [question]
                chats = [single(media, one, spec) for one in asked]
        several = isinstance(question, list | tuple)
        found = self._answers(chats, batch_size, {"max_new_tokens": max_new_tokens, **generation})
        return found if several else found[0]

    def ask_many(
        self,
        questions: Sequence[Any],
        *,
        max_new_tokens: int = NEW_TOKENS,
        batch_size: int = 8,
        **generation: Any,
    ) -> list[Answer]:
        """Ask about different pictures in batches; a decoder answers one after another.

        Args:
            questions: pairs (media, question) or whole chats, as `ask` takes them.
            max_new_tokens: longest answer.
            batch_size: how many are answered at once.
            **generation: as in `ask`.

        Raises:
            UserError: as `ask`; the line says which question.
        """
        spec, chats = self._model.spec, []
        for number, one in enumerate(questions):
            with plain_errors(f"question {number}: "):
                if not is_chat(one) and not (isinstance(one, tuple | list) and len(one) == 2):
                    raise UserError(f"{one!r}; valid: (media, question) or a whole chat")
                chats.append(whole(one, spec) if is_chat(one) else single(one[0], one[1], spec))
        return self._answers(chats, batch_size, {"max_new_tokens": max_new_tokens, **generation})

    def _answers(
        self, chats: Sequence[Chat], batch_size: int, generation: Mapping[str, Any]
    ) -> list[Answer]:
        if self._stack is None:
            raise UserError(
                "the method is not on the model; valid: inside `with espalier.apply(...) as pruned:`"
            )
        spec = self._settled.spec
        with plain_errors():
            size = read_value("batch_size", batch_size, Count)
            given = {**spec.model.generation, **generation}
            check_settings("generation", generation)
            check_generation(given)
            self._settled.check_generation(given)
        chosen = settings({}, spec.model.generation, generation)
        # What a decoder has settled: it answers one at a time.
        if spec.engine.batch_size != "auto":
            size = spec.engine.batch_size
        found: list[Answer] = []
        for start in range(0, len(chats), size):
            block = chats[start : start + size]
            with plain_errors(count=len(chats), first=start):
                found += self._batch(block, chosen.generate, chosen.until)
        return found

    def _batch(
        self, chats: Sequence[Chat], generate: Mapping[str, Any], until: tuple[str, ...]
    ) -> list[Answer]:
        adapter, facts = self._adapter, self._settled.spec.model.facts
        inputs = self._responder.encode(chats)
        grids = rows_of(adapter.layout(without_chats(inputs)))
        asked = [_words(chat) for chat in chats]
        names = identities(chats)
        with _seeded(self._settled.spec.seed, names[0], bool(generate["do_sample"])):
            generated = self._responder.generate(inputs, names, **generate)
        texts = self._responder.decode(generated.ids)
        answers = []
        for chat, grid, question, text, record in zip(
            chats, grids, asked, texts, generated.records, strict=True
        ):
            assert record.origin is not None  # every record of a prefill has it
            kept = tuple(record.origin.tolist())
            answers.append(
                Answer(
                    question=question,
                    text=cut(text, until),
                    tokens=record.new_tokens,
                    visual=record.visual,
                    kept=len(kept),
                    kept_indices=kept,
                    kept_by_step=tuple(tuple(one.tolist()) for one in record.origins),
                    ratio=self._settled.removed(record),
                    cache=_cached(record),
                    flops=flops_of(record, facts, self._settled.method),
                    times_ms=record.times_ms,
                    decoding=decoding_of(record),
                    record=record,
                    _seen=seen_by(adapter, chat, grid),
                )
            )
        return answers


def _cached(record: Record) -> float:
    """Return the share of the visual cache entries that is left; a denoised answer has no cache that could lose any."""
    if not record.visual or record.denoising is not None:
        return 1.0
    return record.kv_entries / max(sum(record.entering), 1)


def _words(chat: Chat) -> str:
    """Return the texts of a chat's last turn."""
    return " ".join(part["text"] for part in chat[-1]["content"] if part["type"] == "text")


@contextmanager
def _seeded(seed: int, name: str, samples: bool) -> Iterator[None]:
    """Seed torch's global generator where `generate` draws from it, and leave no trace."""
    if not samples:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed * 1_000_003 + int(name, 16) % 1_000_003)
        yield


@contextmanager
def plain_errors(before: str = "", count: int = 0, first: int = 0) -> Iterator[None]:
    """Turn what a user can cause into one UserError line in the words of Python.

    What a method's own code raised stays its cause.
    """
    try:
        with in_words_of_python(before, count, first):
            yield
    except MethodError as error:
        line = f"{before}{reworded(str(error), count, first)}"
        raise UserError(line) from error.__cause__
