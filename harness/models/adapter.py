"""The base class of model families, and loading by family."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.engine.positions import ORDER
from espalier.harness.errors import UserError, unknown_name
from espalier.harness.models.build_adapter import build_adapter, build_without_weights
from espalier.harness.models.chat_batches import (
    check_context,
    process_batch,
    refuse_videos,
    special_tokens,
    tensor_to,
)
from espalier.harness.models.chat_media import MARK, Chat, Media, media_of, place_media
from espalier.harness.models.chat_templates import (
    render_chat,
    run_template,
    template_of_processor,
    warn_of_template,
)
from espalier.harness.models.conversations import JOINS, TAGGED, join_of, sha256_of, template_of
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.loader import load_part, quiet_library, special_tokens_only
from espalier.harness.models.random_weights import SPECIAL
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox
from espalier.harness.specs.think_tags import opened_by

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec


class Adapter(ModelParts):
    """The facts of one model family: its modules, its visual positions, how it encodes a chat.

    A family implements the abstract methods; the other methods have defaults that suit most families.

    Args:
        model: a transformers model with `generate`.
        processor: the processor of the model.
        spec: the model's part of the run.
    """

    #: The transformers class of the model.
    model_class: ClassVar[Any]

    #: Valid `model_type` of a checkpoint's config.json; empty: that of the class's own configuration.
    checkpoint_types: ClassVar[tuple[str, ...]] = ()

    #: From patterns of a release's tensor names to the library's; empty: the library knows the names.
    renames: ClassVar[Mapping[str, str]] = {}

    #: Special tokens of the tokenizer for random weights.
    special: ClassVar[Sequence[str]] = SPECIAL

    #: Whether the library loads weights by its plan for processes that share layers (`model.parallel=tensor`).
    loads_shared: ClassVar[bool] = True

    #: Whether chats may hold videos.
    takes_video: ClassVar[bool] = False

    #: Valid keys of `model.processor`.
    settings: ClassVar[tuple[str, ...]] = ()

    #: For models without a file in conf/model: signals that the family's code cannot produce, and whether each visual
    #: token is one patch of the tower.
    lacking: ClassVar[tuple[str, ...]] = ()
    patch_tokens: ClassVar[bool] = False

    #: Whether visual tokens have no place in the picture, so that they cannot be drawn on it.
    unplaced: ClassVar[bool] = False

    #: Whether a checkpoint alone describes the model; other families need a file in conf/model.
    self_described: ClassVar[bool] = True

    #: The default of `model.conversation`, the default template of media in a turn, and those selected by `model.join`.
    conversation: ClassVar[str]
    media: ClassVar[str] = TAGGED
    joins: ClassVar[Mapping[str, str]] = JOINS

    #: Texts that the processor replaces with the tokens of a picture or a video.
    placeholders: ClassVar[tuple[str, ...]] = (MARK,)

    #: Placeholder of a picture if texts may mark the position of pictures, as in lmms-eval's class; else None.
    inline: ClassVar[str | None] = MARK

    #: How the original code tokenises a prompt (harness/models/reference_prompts.py): at once, or each piece between
    #: placeholders alone; `begun` prompts hold the begin token as text.
    pieces: ClassVar[Literal["whole", "alone", "begun"]] = "whole"

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Set inference mode on the model, and left padding and the run's template on the processor."""
        self.model = model.eval()
        self.processor = processor
        self.spec = spec
        self.facts = spec.facts
        if spec.facts.diffusion is not None:
            # The library and harness/engine/visibility.py read from here that attention is bidirectional.
            self.decoder.config.is_causal = False
        tokenizer = processor.tokenizer
        tokenizer.padding_side = "left"
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise UserError(
                f"model={spec.name}: its tokenizer has neither a padding token nor an end of sequence "
                "(tokenizer_config.json); valid: the original file"
            )
        #: Padding token, which follows the end of an answer.
        self.pad_id = int(tokenizer.pad_token_id)
        model.generation_config = special_tokens_only(model.generation_config, self.pad_id)
        #: The checkpoint's chat template; prompts follow it only under `model.conversation=checkpoint`.
        self.shipped_template: str | None = template_of_processor(processor, self.self_described)
        processor.chat_template = run_template(self)

    @classmethod
    def format(cls, name: str | None, join: str | None = None, thinking: bool = False) -> str:
        """Return the chat template of a format and a media rule; None: the family's default.

        With `thinking`, prompts ask for reasoning, where the format has words for it.

        Raises:
            UserError: an unknown format or rule.
        """
        return template_of(name or cls.conversation, cls.format_of_media(join), thinking)

    @classmethod
    def format_of_media(cls, join: str | None = None) -> str:
        """Return the template of the pictures, videos and texts of a turn."""
        return join_of(join, cls.joins) or cls.media

    # ------------------------------------------------------------------ loading

    @classmethod
    def check_settings(cls, spec: ModelSpec) -> None:
        """Raise UserError for a key of `model.processor` that this family does not have."""
        for name in sorted(set(spec.processor) - set(cls.settings)):
            raise unknown_name("model.processor", name, cls.settings or ("nothing",))

    @classmethod
    def types(cls) -> tuple[str, ...]:
        """Return the valid `model_type` values of the family's checkpoints."""
        return cls.checkpoint_types or (cls.model_class.config_class.model_type,)

    @classmethod
    def class_of(cls, config: Any) -> Any:
        """Return the transformers class that a configuration builds."""
        del config
        return cls.model_class

    @property
    def unproved(self) -> Mapping[str, str]:
        """Kinds of site where methods may not act on a model without a file in conf/model, and why; default: none."""
        return {}

    def verify(self) -> None:
        """Check the loaded model by answers; families with tests need no check."""

    @classmethod
    def adopt_processor(cls, processor: Any, spec: ModelSpec) -> Any:
        """Return the caller's processor, set up like the family's own; default: unchanged."""
        del spec
        return processor

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the configuration to load a checkpoint with; default: the checkpoint's."""
        return load_part(spec, cls.model_class.config_class)

    @classmethod
    @abstractmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the processor of a checkpoint, with the settings of `model.processor`."""

    @classmethod
    @abstractmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the transformers configuration built from `model.facts` and `model.architecture`."""

    @classmethod
    @abstractmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return a processor around `tokenizer`, for a model without a checkpoint."""

    # ------------------------------------------------------------------ chats

    def encode(self, chats: Sequence[Chat]) -> dict[str, Any]:
        """Return chats as one left-padded batch on the model's device; see `prepare`."""
        return self.to_device(self.prepare(chats))

    def to_device(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch of `prepare`, moved to the model's device."""
        return {
            name: tensor_to(value, self.device, self.model.dtype) for name, value in batch.items()
        }

    @cached_property
    def thread_copy(self) -> Adapter:
        """A copy with a separate processor, to prepare chats in a second thread: tokenizers are not thread-safe.

        Cost: one copy of the tokenizer; a second for the largest.
        """
        duplicate = copy(self)
        duplicate.processor = deepcopy(self.processor)
        return duplicate

    def preparer(self) -> Callable[[Sequence[Chat]], Mapping[str, Any]]:
        """Return `prepare` for another thread."""
        return self.thread_copy.prepare

    def prepare(self, chats: Sequence[Chat]) -> Mapping[str, Any]:
        """Return chats as one left-padded batch on the CPU.

        Args:
            chats: each a list of {"role", "content": [part, ...]} with parts {"type": "image", "image": picture},
                {"type": "video", "video": file} and {"type": "text", "text": str}.

        Raises:
            UserError: a chat without media under `model.media=required`, a picture or video that cannot be read, a
                prompt longer than the model's context.
        """
        if not self.takes_video:
            refuse_videos(chats, self.spec.name)
        required = self.spec.media == "required"
        chat_media = [self.load_media(chat, n, required) for n, chat in enumerate(chats)]
        texts = [
            self.prompt_text(chat, media) for chat, media in zip(chats, chat_media, strict=True)
        ]
        batch = process_batch(self, texts, chat_media)
        limit = getattr(self.decoder.config, "max_position_embeddings", None)
        check_context(batch["attention_mask"], limit, self.spec.name)
        return batch  # type: ignore[no-any-return]

    def load_media(self, chat: Chat, number: int = 0, required: bool = False) -> Media:
        """Return a chat's pictures and clips, opened with `model.video` and `model.transparency`; see `media_of`."""
        return media_of(number, chat, self.spec.video, required, self.spec.transparency)

    def prompt_text(self, chat: Chat, media: Media) -> str:
        """Return the prompt of a chat for the processor; `media` are the chat's pictures and clips."""
        del media
        return render_chat(self, place_media(chat, self.placeholders, self.inline))

    def prompt_summary(self, chat: Chat) -> dict[str, str | None]:
        """Return the prompt of a chat and the hashes of its template and the checkpoint's, as stored in a result."""
        return {
            "rendered": self.prompt_text(chat, self.load_media(chat)),
            "template_sha256": sha256_of(self.processor.chat_template),
            "checkpoint_template_sha256": sha256_of(self.shipped_template),
            **({"positions": ORDER} if self.facts.rotary_axes > 1 else {}),
        }

    def view_box(self, view: PictureView) -> ViewBox:
        """Return the area of a view on its picture; default: the whole picture, stretched to the view."""
        del view
        return WHOLE

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the family's processor on prompts with the pictures and clips of each."""
        del clips
        return self.run_processor(texts, images=pictures if any(pictures) else None)

    def run_processor(self, texts: list[str], **media: Any) -> Any:
        """Run the processor; the tokenizer adds its special tokens where the library's `apply_chat_template` lets it.

        Raises:
            UserError: see `special_tokens`.
        """
        options = special_tokens(self.processor.tokenizer, texts)
        return self.processor(text=texts, padding=True, return_tensors="pt", **options, **media)

    def decode(self, ids: Tensor) -> list[str]:
        """Return the answers of (B, T) new tokens, without special tokens and after `answer_lead`."""
        texts = self.processor.batch_decode(ids, skip_special_tokens=True)
        return [f"{self.answer_lead}{text.strip()}" for text in texts]

    @cached_property
    def answer_lead(self) -> str:
        """The tag by which prompts open the reasoning of answers; "" for prompts without one."""
        if "think" not in self.processor.chat_template:
            return ""
        turn = {"role": "user", "content": [{"type": "text", "text": "?"}]}
        return opened_by(render_chat(self, [turn]))


def load_adapter(spec: ModelSpec) -> Adapter:
    """Return the adapter of a run, loaded through its family.

    Raises:
        UserError: an unknown family, or a checkpoint that is missing or does not match.
    """
    with quiet_library():
        adapter = build_adapter(ADAPTERS.load(spec.adapter), spec)
    warn_of_template(spec, adapter.shipped_template, adapter.processor.chat_template)
    return adapter


def load_adapter_without_weights(spec: ModelSpec) -> Adapter:
    """Return the adapter of a model that another process runs: it prepares prompts and counts their tokens.

    Raises:
        UserError: as in `load_adapter`.
    """
    with quiet_library():
        return build_without_weights(ADAPTERS.load(spec.adapter), spec)
