"""What every adapter offers, and how one is found and loaded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor
from transformers import GenerationConfig

from espalier.harness.engine.model_parts import Parts
from espalier.harness.engine.positions import ORDER
from espalier.harness.errors import UserError, foreign, unknown_name
from espalier.harness.models.batch_checks import UNFIT, check_context, moved, refuse_videos, unfit
from espalier.harness.models.chat_media import MARK, Chat, Media, marked, media_of
from espalier.harness.models.conversations import (
    JOINS,
    TAGGED,
    flattened,
    join_of,
    sha256_of,
    takes_parts,
    template_of,
)
from espalier.harness.models.facts_check import check_facts
from espalier.harness.models.foreign_templates import check_bounds
from espalier.harness.models.loader import (
    MALFORMED,
    check_type,
    held_back,
    load_checkpoint,
    load_part,
    source_of,
    template_beside,
    template_of_processor,
    warn_of_template,
)
from espalier.harness.models.memory_check import check_room, free_room
from espalier.harness.models.output_heads import settle_head
from espalier.harness.models.random_weights import SPECIAL, build_random, byte_tokenizer
from espalier.harness.models.skeleton import build_skeleton, weight_bytes
from espalier.harness.models.view_placement import WHOLE, Box, Sight
from espalier.harness.paths import rooted
from espalier.harness.specs.bounded_templates import FAILURES
from espalier.harness.specs.registry import Registry
from espalier.harness.specs.run_spec import CHECKPOINT

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

ADAPTERS = Registry("model.adapter")
ADAPTERS.add("llava", "espalier.harness.models.llava:LlavaAdapter")
ADAPTERS.add("llava_next", "espalier.harness.models.llava_next:LlavaNextAdapter")
ADAPTERS.add("llava_onevision", "espalier.harness.models.llava_onevision:LlavaOnevisionAdapter")
ADAPTERS.add("llava_video", "espalier.harness.models.llava_video:LlavaVideoAdapter")
ADAPTERS.add("qwen2_vl", "espalier.harness.models.qwen2_vl:Qwen2VLAdapter")
ADAPTERS.add("qwen2_5_vl", "espalier.harness.models.qwen2_5_vl:Qwen25VLAdapter")
ADAPTERS.add("qwen3_vl", "espalier.harness.models.qwen3_vl:Qwen3VLAdapter")
ADAPTERS.add("internvl", "espalier.harness.models.internvl:InternVLAdapter")
ADAPTERS.add("deepseek_ocr", "espalier.harness.models.deepseek_ocr:DeepseekOcrAdapter")
ADAPTERS.add("llada_v", "espalier.harness.models.llada_v:LladaVAdapter")
ADAPTERS.add("lavida", "espalier.harness.models.lavida:LavidaAdapter")


class Adapter(Parts):
    """The facts of one model family: where its parts are, which positions are visual, how a chat is encoded.

    A family implements what is abstract; the rest has defaults that fit most.

    Args:
        model: a transformers model with `generate`.
        processor: its processor, with a chat template.
        spec: the model's part of the run.
    """

    #: The transformers class that holds the weights.
    model_class: ClassVar[Any]

    #: What a checkpoint's config.json may give as `model_type`; empty: what the class itself writes.
    checkpoint_types: ClassVar[tuple[str, ...]] = ()

    #: From patterns of a release's tensor names to the library's; empty: the library knows them.
    renames: ClassVar[Mapping[str, str]] = {}

    #: Special tokens of the tokenizer beside random weights.
    special: ClassVar[Sequence[str]] = SPECIAL

    #: Whether chats may hold videos.
    takes_video: ClassVar[bool] = False

    #: What `model.processor` may hold.
    settings: ClassVar[tuple[str, ...]] = ()

    #: Signals that the family's code cannot produce, and whether visual tokens are the tower's patches one to one: for
    #: models without a file of conf/model.
    lacking: ClassVar[tuple[str, ...]] = ()
    patch_tokens: ClassVar[bool] = False

    #: Whether a checkpoint alone says how the model is built; of other families a file of conf/model has to.
    self_described: ClassVar[bool] = True

    #: The frame of prompts where `model.conversation` names none, and how pictures and videos stand in it,
    #: always and by the names of `model.join`.
    conversation: ClassVar[str]
    media: ClassVar[str] = TAGGED
    joins: ClassVar[Mapping[str, str]] = JOINS

    #: Texts that the processor replaces by the tokens of a picture or a video.
    placeholders: ClassVar[tuple[str, ...]] = (MARK,)

    #: The one of a picture where texts may say where pictures belong, as they may to lmms-eval's class of the family.
    inline: ClassVar[str | None] = MARK

    #: What the originals tokenise at once (harness/models/reference_prompts.py): `begun` prompts hold their begin
    #: token.
    pieces: ClassVar[Literal["whole", "alone", "begun"]] = "whole"

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Put the model in inference mode and left padding on the tokenizer."""
        self.model = model.eval()
        self.processor = processor
        self.spec = spec
        self.facts = spec.facts
        if spec.facts.diffusion is not None:
            # How the library, and harness/engine/visibility.py with it, learns that every token sees every other.
            self.decoder.config.is_causal = False
        tokenizer = processor.tokenizer
        tokenizer.padding_side = "left"
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise UserError(
                f"model={spec.name}: its tokenizer names neither a padding token nor an end of sequence "
                "(tokenizer_config.json); valid: the original file"
            )
        #: Token that fills answers after their end.
        self.pad_id = int(tokenizer.pad_token_id)
        model.generation_config = self._ends_alone(model.generation_config)
        #: The chat template that lies beside the checkpoint; prompts follow it only if the run asks for that.
        self.shipped: str | None = template_of_processor(processor, self.self_described)
        processor.chat_template = self._template()

    @classmethod
    def format(cls, name: str | None, join: str | None = None) -> str:
        """Return the chat template of a frame with a rule for media, by default the family's own.

        Raises:
            UserError: there is no such frame, or no such rule.
        """
        return template_of(name or cls.conversation, cls.format_of_media(join))

    def _template(self) -> str:
        """Return the chat template of the run.

        Raises:
            UserError: the checkpoint's is asked for, and it has none.
        """
        if self.spec.conversation != CHECKPOINT:
            return self.format(self.spec.conversation, self.spec.prompt.join)
        shipped = self.shipped or template_beside(self.spec)
        if shipped is None:
            raise UserError(
                f"model.conversation={CHECKPOINT!r}: no chat template lies beside model={self.spec.name!r}; "
                f"valid: null for the family's own, {self.conversation}"
            )
        if takes_parts(shipped):
            return shipped
        return flattened(shipped, self.format_of_media(self.spec.prompt.join))

    @classmethod
    def format_of_media(cls, join: str | None = None) -> str:
        """Return the rule for the pictures, videos and texts of a turn."""
        return join_of(join, cls.joins) or cls.media

    def _ends_alone(self, released: GenerationConfig) -> GenerationConfig:
        """Return the special tokens of a checkpoint's generation settings and nothing else of them.

        What it says of penalties and sampling would change answers without standing in any row: `generate` fills in
        from there whatever a call leaves out. Such settings belong into `model.generation`.
        """
        return GenerationConfig(
            bos_token_id=released.bos_token_id,
            eos_token_id=released.eos_token_id,
            # A checkpoint that states none would fill up answers with a warning each.
            pad_token_id=self.pad_id,
        )

    # ------------------------------------------------------------------ loading

    @classmethod
    def check_settings(cls, spec: ModelSpec) -> None:
        """Raise UserError for a setting of `model.processor` that this family does not have."""
        for name in sorted(set(spec.processor) - set(cls.settings)):
            raise unknown_name("model.processor", name, cls.settings or ("nothing",))

    @classmethod
    def types(cls) -> tuple[str, ...]:
        """Return what a checkpoint of the family gives as `model_type`."""
        return cls.checkpoint_types or (cls.model_class.config_class.model_type,)

    @classmethod
    def adopted(cls, processor: Any, spec: ModelSpec) -> Any:
        """Return a processor that somebody else loaded, set up as the family's own are."""
        del spec
        return processor

    @classmethod
    def load(cls, spec: ModelSpec) -> Adapter:
        """Load weights and processor, or build both where `model.weights=random` asks for it.

        Raises:
            UserError: nothing there, or it does not fit; the line names the config key.
        """
        cls.check_settings(spec)
        if spec.weights == "random":
            processor = cls.random_processor(spec)
            tokenizer = processor.tokenizer
            config = cls.configuration(spec, tokenizer)
        else:
            check_type(spec, cls.types())
            config = cls.checkpoint_config(spec)
            settle_head(config, spec, cls.renames)
            problem = f"model={spec.name}: the processor of {source_of(spec)[0]!r} cannot be used"
            with foreign(problem, "the checkpoint's original files", MALFORMED):
                processor = cls.load_processor(spec)
                tokenizer = processor.tokenizer
        # Judged before memory is taken: what the configuration would build, without weights.
        skeleton = build_skeleton(cls.model_class, config, spec)
        # An adapter gives its processor the run's chat template: the one to come must still find the checkpoint's.
        check_facts(cls(skeleton, copy(processor), spec))
        check_room(spec, weight_bytes(skeleton), free_room())
        if spec.weights == "random":
            model = build_random(cls.model_class, config, tokenizer, spec)
        else:
            model = load_checkpoint(cls.model_class, config, spec, cls.renames)
        adapter = cls(model, processor, spec)
        check_facts(adapter)
        return adapter

    @classmethod
    def random_processor(cls, spec: ModelSpec) -> Any:
        """Return the processor beside random weights: of the folder `architecture.processor`, else one of bytes."""
        folder = spec.architecture.get("processor")
        if folder is None:
            return cls.new_processor(spec, byte_tokenizer(cls.special))
        return cls.load_processor(replace(spec, path=rooted(folder)))

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the configuration to load a checkpoint with: here, its own."""
        return load_part(spec, cls.model_class.config_class)

    @classmethod
    @abstractmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Load the processor of a checkpoint, set up as `model.processor` asks."""

    @classmethod
    @abstractmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the transformers configuration that `model.facts` and `model.architecture` describe."""

    @classmethod
    @abstractmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return a processor around `tokenizer`, for a model without a checkpoint."""

    # ------------------------------------------------------------------ chats

    def encode(self, chats: Sequence[Chat]) -> dict[str, Any]:
        """Turn chats into one left-padded batch on the model's device; see `prepare`."""
        return self.moved(self.prepare(chats))

    def moved(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch of `prepare` on the model's device."""
        return moved(batch, self.device, self.model.dtype)

    @cached_property
    def apart(self) -> Adapter:
        """The same adapter with a processor of its own, to prepare chats in another thread: tokenizers take one alone.

        Cost: a copy of the tokenizer, made once; a second for the largest.
        """
        other = copy(self)
        other.processor = deepcopy(self.processor)
        return other

    def preparer(self) -> Callable[[Sequence[Chat]], Mapping[str, Any]]:
        """Return `prepare` for another thread."""
        return self.apart.prepare

    def prepare(self, chats: Sequence[Chat]) -> Mapping[str, Any]:
        """Turn chats into one left-padded batch in memory, whatever device the model is on.

        Args:
            chats: each a list of {"role", "content": [part, ...]} with parts {"type": "image", "image": picture},
                {"type": "video", "video": file} and {"type": "text", "text": str}.

        Raises:
            UserError: a chat without an image or video where `model.media=required`, a picture or video that cannot be
                read, a prompt that is longer than the model's context.
        """
        if not self.takes_video:
            refuse_videos(chats, self.spec.name)
        required = self.spec.media == "required"
        found = [self.opened(chat, n, required) for n, chat in enumerate(chats)]
        texts = [self.written(chat, media) for chat, media in zip(chats, found, strict=True)]
        batch = self._processed(texts, found)
        limit = getattr(self.decoder.config, "max_position_embeddings", None)
        check_context(batch["attention_mask"], limit, self.spec.name)
        return batch  # type: ignore[no-any-return]

    def _processed(self, texts: list[str], media: Sequence[Media]) -> Any:
        """Run the processor; what it refuses of pictures and videos is named by number and size."""
        try:
            return self.process(texts, [m.pictures for m in media], [m.clips for m in media])
        except UserError:
            raise
        except UNFIT as error:
            for number, (text, own) in enumerate(zip(texts, media, strict=True)):
                try:
                    self.process([text], [own.pictures], [own.clips])
                except UNFIT as refusal:
                    where = f"chat {number} of the batch: "
                    raise unfit(where, own, self.processor, self.spec.name, refusal) from error
            raise

    def opened(self, chat: Chat, number: int = 0, required: bool = False) -> Media:
        """Return a chat's pictures and clips as `model.video` and `model.transparency` have them; see `media_of`."""
        return media_of(number, chat, self.spec.video, required, self.spec.transparency)

    def written(self, chat: Chat, media: Media) -> str:
        """Return the prompt of a chat as it goes to the processor; `media` are its own."""
        del media
        return self.prompt(marked(chat, self.placeholders, self.inline))

    def told(self, chat: Chat) -> dict[str, str | None]:
        """Return what a row says of prompts: this chat's, and the hashes of its template and the checkpoint's own."""
        return {
            "rendered": self.written(chat, self.opened(chat)),
            "template_sha256": sha256_of(self.processor.chat_template),
            "checkpoint_template_sha256": sha256_of(self.shipped),
            **({"positions": ORDER} if self.facts.rotary_axes > 1 else {}),
        }

    def placed(self, sight: Sight) -> Box:
        """Return where in a picture a view of it lies; here, any view is the whole picture, stretched."""
        del sight
        return WHOLE

    def prompt(self, chat: Chat) -> str:
        """Return the chat as one string with a placeholder for each image and video."""
        write = self.processor.apply_chat_template
        if self.spec.conversation != CHECKPOINT:
            return str(write(chat, tokenize=False, add_generation_prompt=True))
        try:
            check_bounds(self.processor.chat_template, chat)
            return str(write(chat, tokenize=False, add_generation_prompt=True))
        except FAILURES as error:
            raise UserError(
                f"model.conversation={CHECKPOINT!r}: the chat template beside model={self.spec.name!r}: "
                f"{type(error).__name__}: {error}; valid: null for the family's own, {self.conversation}"
            ) from error

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the family's processor on prompts, and the pictures and clips of each."""
        images = pictures if any(pictures) else None
        return self.processor(text=texts, images=images, padding=True, return_tensors="pt")

    def decode(self, ids: Tensor) -> list[str]:
        """Turn (B, T) new tokens into answers without special tokens."""
        return [text.strip() for text in self.processor.batch_decode(ids, skip_special_tokens=True)]


def family_of(kind: str | None) -> str:
    """Return the family whose checkpoints are of the type `kind`, a config's `model_type`.

    Raises:
        UserError: no family's are; the line lists the types that are known.

    Cost: imports the code of every family, a second or two.
    """
    found = {one: name for name in ADAPTERS.names() for one in ADAPTERS.load(name).types()}
    if kind not in found:
        raise unknown_name("model_type", str(kind), found)
    return found[kind]


def load_adapter(spec: ModelSpec) -> Adapter:
    """Load the model of a run through its family's adapter.

    Raises:
        UserError: unknown family, missing or unfitting checkpoint.
    """
    with held_back():
        adapter: Adapter = ADAPTERS.load(spec.adapter).load(spec)
    warn_of_template(spec, adapter.shipped, adapter.processor.chat_template)
    return adapter
