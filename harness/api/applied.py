"""A method applied to a model inside a `with`, answering questions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any

import torch

from espalier.harness.api.answer import Answer, RecordedPrefill, decoding_of, flops_of
from espalier.harness.api.argument_errors import user_errors
from espalier.harness.api.loaded_models import ACTING, Model
from espalier.harness.api.open_method import CheckedMethod, open_responder
from espalier.harness.api.own_generate import pruned_generate
from espalier.harness.api.questions import is_chat, open_chat, question_chat
from espalier.harness.api.visible_tokens import grid_rows, visible_chat
from espalier.harness.engine.record import SampleRecord
from espalier.harness.engine.session_setup import PrefillScores
from espalier.harness.errors import UserError, brief, tell_once
from espalier.harness.kinds.kind import OpenMethod
from espalier.harness.media.frames import Clip
from espalier.harness.models.chat_media import Chat
from espalier.harness.settings import Count, read_value
from espalier.harness.specs.generation import check_generation, check_settings, cut, settings

#: Default of `max_new_tokens`.
NEW_TOKENS = 128


class Applied:
    """The result of `apply`: a context manager that answers questions while it is open.

    Args:
        checked: the method, after all checks.
        model: the model.
        draft: the loaded draft model; None: no draft, or one loaded on entry.
    """

    def __init__(self, checked: CheckedMethod, model: Model, draft: Model | None) -> None:
        self._checked = checked
        self._model = model
        self._draft = draft
        self._stack: ExitStack | None = None

    def __repr__(self) -> str:
        """Return method, model and budget."""
        spec = self._checked.spec
        budget = spec.budget
        amount = f"ratio {budget.amount}" if budget.count is None else budget.amount
        return f"<{self._checked.method!r} on {spec.model.name}, {budget.rule} {amount}>"

    def __enter__(self) -> Applied:
        """Install the method on the model.

        Raises:
            UserError: another method acts on the model, its attention or layers are not supported, or the draft does
                not match it.
        """
        if self._stack is not None:
            raise RuntimeError("this `with` is open already; call apply(...) again for another")
        with ExitStack() as stack, user_errors():
            self._adapter = stack.enter_context(self._model.open_adapter())
            draft = None if self._draft is None else stack.enter_context(self._draft.open_adapter())
            if self._checked.acts:
                models = {self._adapter.model, *([] if draft is None else [draft.model])}
                for model in models:
                    _reserve(model, self._checked.spec.method.title)
                    stack.callback(delattr, model, ACTING)
            self._opened: OpenMethod = stack.enter_context(
                open_responder(self._checked, self._adapter, draft)
            )
            if self._checked.acts:
                name = self._checked.spec.method.title
                stack.enter_context(pruned_generate(self._opened, name))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the model."""
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
        record: bool = False,
        **generation: Any,
    ) -> Any:
        """Ask a question about pictures, a video or no media.

        Args:
            media: placed before the question: a PIL image, a path or address, the bytes of a file, an array (H, W, 3)
                or tensor of uint8 or of floats in [0, 1]; the path of a video or `espalier.video(frames)`; a list of
                these; None. Alternatively a chat that replaces media and question: a list of turns with `role` and
                `content`.
            question: a text, or a list of texts about the same media.
            max_new_tokens: maximum length of an answer, in tokens.
            batch_size: number of questions of a list answered at once.
            record: keep attention and scores, for `answer.attention(layer)` and `answer.scores()`; the prefill takes
                longer.
            **generation: arguments of transformers' `generate`: `do_sample`, `temperature`, `num_beams` and so on.
                `until`: strings that end the answer.

        Returns:
            One Answer, or a list of answers if `question` is a list.

        Raises:
            UserError: an input cannot be opened, or an argument is not supported; one line.
        """
        spec = self._model.spec
        is_list = isinstance(question, list | tuple)
        with user_errors():
            if not is_chat(media):
                questions = question if is_list else [question]
                chats = [question_chat(media, text, spec) for text in questions]
            elif question is None:
                chats = [open_chat(media, spec)]
            else:
                raise UserError("question: a chat holds its question already; valid: ask(chat)")
        arguments = {"max_new_tokens": max_new_tokens, **generation}
        answers = self._answers(chats, batch_size, record, arguments)
        return answers if is_list else answers[0]

    def ask_many(
        self,
        questions: Sequence[Any],
        *,
        max_new_tokens: int = NEW_TOKENS,
        batch_size: int = 8,
        record: bool = False,
        **generation: Any,
    ) -> list[Answer]:
        """Ask questions about different media in batches; a decoder answers them one at a time.

        Args:
            questions: pairs (media, question) or chats, as in `ask`.
            max_new_tokens: maximum length of an answer, in tokens.
            batch_size: number of questions answered at once.
            record: as in `ask`.
            **generation: as in `ask`.

        Raises:
            UserError: as in `ask`; the line starts with the number of the question.
        """
        spec, chats = self._model.spec, []
        if not isinstance(questions, Iterable):
            raise UserError(f"questions={questions!r}; valid: a list of (media, question) or chats")
        for number, request in enumerate(questions):
            with user_errors(f"question {number}: "):
                if is_chat(request):
                    chats.append(open_chat(request, spec))
                elif isinstance(request, tuple | list) and len(request) == 2:
                    media, question = request
                    chats.append(question_chat(media, question, spec))
                else:
                    raise UserError(f"{request!r}; valid: (media, question) or a chat")
        arguments = {"max_new_tokens": max_new_tokens, **generation}
        return self._answers(chats, batch_size, record, arguments)

    def _answers(
        self, chats: Sequence[Chat], batch_size: int, record: bool, generation: Mapping[str, Any]
    ) -> list[Answer]:
        if self._stack is None:
            raise UserError(
                "the method is not applied; valid: inside `with espalier.apply(...) as pruned:`"
            )
        spec = self._checked.spec
        with user_errors():
            size = read_value("batch_size", batch_size, Count)
            records = read_value("record", record, bool)
            collect = self._opened.collect_scores if records else nullcontext
            if collect is None:
                raise UserError(
                    "record=True keeps what one prefill reads, and this answer takes several (a draft, or denoising "
                    "steps); valid: False"
                )
            merged = {**spec.model.generation, **generation}
            check_settings("generation", generation)
            check_generation(merged)
            self._checked.check_generation(merged)
            facts = spec.model.facts
            resolved = settings(
                {},
                spec.model.generation,
                generation,
                denoises=facts.denoises,
                draws=facts.canvas is not None,
            )
        # Decoders set 1: they answer one sample at a time.
        if spec.engine.batch_size != "auto":
            size = spec.engine.batch_size
        answers: list[Answer] = []
        for start in range(0, len(chats), size):
            block = chats[start : start + size]
            with user_errors(questions=len(chats), first=start):
                answers += self._batch(block, resolved.generate, resolved.until, collect)
        return answers

    def _batch(
        self,
        chats: Sequence[Chat],
        generate: Mapping[str, Any],
        until: tuple[str, ...],
        collect: Callable[[], AbstractContextManager[PrefillScores | None]],
    ) -> list[Answer]:
        adapter, facts = self._adapter, self._checked.spec.model.facts
        inputs = self._opened.encode(chats)
        questions = [
            " ".join(part["text"] for part in chat[-1]["content"] if part["type"] == "text")
            for chat in chats
        ]
        names = sample_ids(chats)
        tell_unknown(adapter.processor.tokenizer, questions, adapter.spec.name)
        grids = grid_rows(adapter, inputs)
        seed, samples = self._checked.spec.seed, bool(generate["do_sample"])
        # Sampling draws from torch's global generator.
        with torch.random.fork_rng(enabled=samples), collect() as prefill:
            if samples:
                torch.manual_seed(seed * 1_000_003 + int(names[0], 16) % 1_000_003)
            generated = self._opened.generator.generate(inputs, names, **generate)
        texts = self._opened.adapter.decode(generated.ids)
        answers = []
        for row, (chat, grid, question, text, record) in enumerate(
            zip(chats, grids, questions, texts, generated.records, strict=True)
        ):
            assert record.origin is not None  # every record of a prefill has it
            kept = tuple(record.origin.tolist())
            budget = self._checked.spec.budget
            if budget.clips(record.visual):
                tell_once(
                    f"keep={budget.count}: a question has {record.visual} visual tokens, and keeps all"
                )
            answers.append(
                Answer(
                    question=question,
                    text=cut(text, until),
                    tokens=record.new_tokens,
                    visual=record.visual,
                    kept=len(kept),
                    kept_indices=kept,
                    kept_by_step=tuple(tuple(indices.tolist()) for indices in record.origins),
                    ratio=self._checked.removed(record),
                    cache=_cached(record),
                    flops=flops_of(record, facts, self._checked.method),
                    times_ms=record.times_ms,
                    decoding=decoding_of(record),
                    record=record,
                    _visible=visible_chat(adapter, chat, grid),
                    _prefill=RecordedPrefill.of_row(prefill, row, len(chats), record.visual),
                )
            )
        return answers


def _reserve(model: torch.nn.Module, method: str) -> None:
    """Let one method act on a model: `ask` of two would answer under one of them, whichever it is called on.

    Raises:
        UserError: another method acts on the model.
    """
    acting = vars(model).get(ACTING)
    if acting is not None:
        raise UserError(
            f"method={method!r}: method={acting!r} acts on this model already, and nested `with` blocks do not combine "
            f"methods; valid: one `with` after the other, apply(model, [{acting!r}, {method!r}]) for two that drop "
            "tokens, or apply(..., compressor=<a cache compressor>)"
        )
    setattr(model, ACTING, method)


def _cached(record: SampleRecord) -> float:
    """Return the remaining share of the visual cache entries; 1 for a denoised answer, which has no cache."""
    if not record.visual or record.denoising is not None:
        return 1.0
    return record.kv_entries / max(sum(record.entering), 1)


def tell_unknown(tokenizer: Any, questions: Iterable[str], model: str) -> None:
    """Print which words of questions a model has no token for, once for each set of words."""
    unknown_id = tokenizer.unk_token_id
    if unknown_id is None:
        return
    words = dict.fromkeys(word for question in questions for word in question.split())
    unknown = [
        word for word in words if unknown_id in tokenizer(word, add_special_tokens=False).input_ids
    ]
    if unknown:
        names = brief(", ".join(map(repr, unknown)))
        tell_once(
            f"model={model!r} has no token for {names}: they are read as unknown, and the answer may mean nothing"
        )


def sample_ids(chats: Sequence[Chat]) -> list[str]:
    """Return 12 hex digits for each chat, a hash of its content in order.

    They seed the random draws of a sample. Cost: one pass over the pixels, once for media that chats share.

    Args:
        chats: chats with opened pictures and clips.
    """
    # Keyed by object: questions about one video share its frames.
    digests: dict[int, str] = {}

    def content(part: dict[str, Any]) -> str:
        medium = part[part["type"]]
        if part["type"] == "text":
            return str(medium)
        if id(medium) not in digests:
            digests[id(medium)] = _digest(medium)
        return digests[id(medium)]

    lists = [
        [
            [turn["role"], [[part["type"], content(part)] for part in turn["content"]]]
            for turn in chat
        ]
        for chat in chats
    ]
    return [_hashed(json.dumps(turns).encode()) for turns in lists]


def _digest(medium: Any) -> str:
    """Return a digest of a picture's pixels, or of a clip's frames and times."""
    if isinstance(medium, Clip):
        header = (medium.frames.shape, medium.timestamps, medium.fps, medium.duration)
        return _hashed(repr(header).encode() + medium.frames.tobytes())
    return _hashed(repr((medium.mode, medium.size)).encode() + medium.tobytes())


def _hashed(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()
