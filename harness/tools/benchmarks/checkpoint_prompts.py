"""Check a published model for a benchmark: its checkpoint is complete, and its prompts equal the originals.

LLaVA's code and its descendants, and DeepSeek-OCR's, split a prompt at its placeholders and tokenise each piece, with
one begin token. A tokenizer that marks the start of a text (sentencepiece's blank) then marks each piece, unlike the
library's processors, which tokenise the prompt at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.evaluation.lmms_tasks import LoadedBenchmark, quiet
from espalier.harness.evaluation.prompt_text import chat_of, worded
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import build_skeleton
from espalier.harness.models.chat_media import Chat
from espalier.harness.models.checkpoint_files import check_checkpoint
from espalier.harness.models.conversations import other_template
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.quantisation import checkpoint_folder
from espalier.harness.ranks import without_launcher
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from espalier.harness.tools.doctor.machine_report import NotHere

#: Placeholder of a picture or a video among token ids.
SEEN = -1


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as token ids, `SEEN` for each picture or video.

    Attributes:
        prompt: the text.
        ours: token ids of the model's input.
        reference: token ids of the original procedure.
        words: token of each id.
    """

    prompt: str
    ours: tuple[int, ...]
    reference: tuple[int, ...]
    words: dict[int, str]

    @property
    def difference(self) -> str | None:
        """One line about the first different token; None if all are equal."""
        if self.ours == self.reference:
            return None
        pairs = zip(self.ours, self.reference, strict=False)
        place = next(
            (n for n, (token, other_token) in enumerate(pairs) if token != other_token),
            min(len(self.ours), len(self.reference)),
        )
        return (
            f"token {place}: here {self._at(self.ours, place)}, in the original {self._at(self.reference, place)}; "
            f"{len(self.ours)} and {len(self.reference)} tokens"
        )

    def _at(self, ids: Sequence[int], place: int) -> str:
        if place >= len(ids):
            return "the end"
        return "a picture" if ids[place] == SEEN else f"{ids[place]} {self.words[ids[place]]!r}"


def piecewise_ids(
    tokenizer: Any, prompt: str, placeholders: Sequence[str], keeps_begin: bool = False
) -> list[int]:
    """Return a prompt's ids by the original procedure, which tokenises each piece between placeholders.

    If the first piece starts with the begin token, LLaVA's code drops the first token of each later piece, assuming
    another begin token.

    Args:
        tokenizer: tokenizer of the model.
        prompt: prompt with a placeholder for each picture or video.
        placeholders: texts of the placeholders.
        keeps_begin: the prompt holds its begin token as text and the tokenizer adds none to the pieces (DeepSeek-OCR).
    """
    pieces, remaining = [], prompt
    while marks := [(remaining.index(mark), mark) for mark in placeholders if mark in remaining]:
        start, mark = min(marks)
        pieces.append(remaining[:start])
        remaining = remaining[start + len(mark) :]
    tokenised = [
        list(tokenizer(piece, add_special_tokens=not keeps_begin)["input_ids"])
        for piece in (*pieces, remaining)
    ]
    begins = not keeps_begin and tokenised[0][:1] == [tokenizer.bos_token_id]
    ids = list(tokenised[0])
    for piece in tokenised[1:]:
        ids += [SEEN, *piece[begins:]]
    return ids


def compare_tokens(adapter: Adapter, chat: Chat) -> PromptTokens:
    """Return the tokens of a chat in the model's input and by the original procedure.

    Both are equal by construction for families with an original that tokenises a prompt at once. Cost: processes the
    pictures of the chat, without a forward.
    """
    tokenizer = adapter.processor.tokenizer
    prompt = adapter.prompt_text(chat, adapter.load_media(chat))
    inputs = adapter.prepare([chat])
    ids = inputs["input_ids"][0][inputs["attention_mask"][0].bool()].tolist()
    visual = set(adapter.items(inputs))
    ours = [
        token
        for is_visual, run in groupby(ids, lambda token: token in visual)
        for token in ([SEEN] if is_visual else run)
    ]
    reference = ours
    if adapter.data.pieces != "whole":
        keeps_begin = adapter.data.pieces == "begun"
        reference = piecewise_ids(tokenizer, prompt, adapter.data.placeholders, keeps_begin)
    vocabulary = {token for token in (*ours, *reference) if token != SEEN}
    words = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in vocabulary}
    return PromptTokens(prompt, tuple(ours), tuple(reference), words)


#: Prompts that are compared.
PROMPTS = 3


def whole_checkpoint(spec: RunSpec) -> str:
    """Return where a model's checkpoint is, after reading the header of every weight file.

    Raises:
        NotHere: the model has random weights.
        UserError: it is not here, or a file is missing or damaged.
    """
    model = spec.model
    if model.weights == "random":
        raise NotHere(f"model={model.name} has random weights")
    folder = checkpoint_folder(model)
    if folder is None:
        raise UserError(
            f"model={model.name}: {model.hub} is not in the cache; valid: python -m espalier benchmarks prefetch "
            f"{spec.benchmark.name} model={model.name}"
        )
    check_checkpoint(folder, Digests())
    return f"{folder}: whole"


def same_tokens(spec: RunSpec, loaded: LoadedBenchmark) -> tuple[str, str]:
    """Compare prompts' token ids with those of the originals' procedure, and the template with the model file's.

    Returns:
        What is the same or differs, in one line, and the first prompt.

    Raises:
        NotHere: the model has random weights.
        UserError: its processor or configuration cannot be read.
    """
    if spec.model.weights == "random":
        raise NotHere(f"model={spec.model.name} has random weights")
    family = ADAPTERS.load(spec.model.adapter)
    config = family.checkpoint_config(spec.model)
    skeleton = build_skeleton(family.class_of(config), config, spec.model)
    adapter = family(skeleton, family.load_processor(spec.model), spec.model)
    task = loaded.tasks[0]
    name = task.config.task
    wording = partial(worded, spec.benchmark.text, {name: task})
    prompts: list[PromptTokens] = []
    with without_launcher(), quiet(), loaded.serving():
        for row in range(min(PROMPTS, len(task.eval_docs))):
            doc = task.eval_docs[row]
            messages = wording(task.doc_to_messages(doc), doc, name, row)
            prompts.append(compare_tokens(adapter, chat_of(messages)))
    differences = [
        f"prompt {row} differs from the original's, {tokens.difference}"
        for row, tokens in enumerate(prompts)
        if tokens.difference is not None
    ]
    summary = differences[:1] or [
        f"{len(prompts)} prompts of {', '.join(str(len(tokens.ours)) for tokens in prompts)} tokens as in the original"
    ]
    template = other_template(spec.model, adapter.shipped_template)
    if template is not None:
        summary.append(template)
    elif spec.model.template_sha256 is not None:
        summary.append("the chat template is the one that the model's file knows")
    return "; ".join(summary), prompts[0].prompt
