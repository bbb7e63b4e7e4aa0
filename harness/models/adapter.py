"""The base class of model families, and what families state as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from transformers import AutoProcessor, PreTrainedTokenizerFast

from espalier.harness.engine.layer_inputs import ORDER, LayerTypes
from espalier.harness.engine.model_parts import ModelParts, PixelGrids
from espalier.harness.errors import UserError, unknown_name
from espalier.harness.models.chat_media import MARK, Chat, Media, media_of, place_media
from espalier.harness.models.conversations import (
    TAGGED,
    flatten_template,
    join_of,
    local_template,
    sha256_of,
    takes_parts,
    template_of,
    template_of_processor,
    thinking_of,
    thinking_options,
)
from espalier.harness.models.loader import load_part, special_tokens_only
from espalier.harness.models.random_weights import (
    SPECIAL,
    Built,
    Value,
    text_config,
    token_id,
    vision_config,
)
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox
from espalier.harness.settings import gather
from espalier.harness.specs.generation import opened_by
from espalier.harness.specs.question_templates import FAILURES, failure_words, limited
from espalier.harness.specs.run_spec import CHECKPOINT, ModelSpec

#: Exceptions of processors for pictures and frames of unsupported sizes.
UNFIT = (ValueError, ZeroDivisionError)


def refuse_videos(chats: Sequence[Chat], model: str) -> None:
    """Raise UserError for the first chat with a video; for models that take images only."""
    for number, chat in enumerate(chats):
        if any(part["type"] == "video" for turn in chat for part in turn["content"]):
            raise UserError(
                f"chat {number} of the batch holds a video; model={model!r} takes images only"
            )


def refusal_error(
    where: str, media: Media, processor: Any, model: str, refusal: Exception
) -> Exception:
    """Return the error line for the media of a chat that a processor refuses; `refusal` itself if there are no media.

    Args:
        where: start of the line.
        media: media of the chat.
        processor: processor of the model.
        model: name of the model.
        refusal: exception of the processor.
    """
    sizes = [
        f"picture {number} ({picture.width}x{picture.height})"
        for number, picture in enumerate(media.pictures)
    ]
    words = " ".join(str(refusal).split())
    for number, picture in enumerate(media.pictures):
        try:
            processor.image_processor(images=[picture], return_tensors="pt")
        except UNFIT:
            sizes = [sizes[number]]
            break
    else:
        if sizes and not media.clips:
            return UserError(
                f"{where}the processor of model={model!r} takes {', '.join(sizes)} alone, and not in a list with the "
                f"prompt: {words}"
            )
        sizes += [
            f"video {number} (frames of {clip.frames.shape[2]}x{clip.frames.shape[1]})"
            for number, clip in enumerate(media.clips)
        ]
    if not sizes:
        return refusal
    return UserError(f"{where}{', '.join(sizes)} does not fit model={model!r}: {words}")


def check_context(mask: Tensor, limit: int | None, model: str) -> None:
    """Raise UserError for the first prompt that fills the model's context.

    Args:
        mask: (B, T) attention mask of the prompts.
        limit: length of the model's context in tokens; None: unknown.
        model: name of the model.
    """
    if limit is None:
        return
    for number, length in enumerate(mask.sum(1).tolist()):
        if length >= limit:
            raise UserError(
                f"chat {number} of the batch has {length} tokens, model={model!r} takes fewer than {limit}"
            )


def special_tokens(tokenizer: Any, texts: Sequence[str]) -> dict[str, bool]:
    """Return the option of a tokenizer for prompts: it adds no special tokens to those that begin with the begin token.

    This is the rule of the library's `processor.apply_chat_template(tokenize=True)`.

    Raises:
        UserError: only some of the prompts begin with it, and one call tokenises all of them.
    """
    begin = tokenizer.bos_token
    begun = {begin is not None and text.startswith(begin) for text in texts}
    if len(begun) > 1:
        raise UserError(
            f"some prompts of a batch begin with {begin!r} and others do not; valid: engine.batch_size=1"
        )
    return {"add_special_tokens": False} if True in begun else {}


def edge_of(size: int | Sequence[int]) -> int:
    """Return the edge of a square that a configuration states as one number or as height and width."""
    return int(size[0] if isinstance(size, Sequence) else size)


def tensor_to(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a value on a device; floating-point tensors, the pixels, also take the dtype."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


#: Loads the tokenizer of tokenizer.json; the class named in a checkpoint's settings may rebuild it.
FAST = partial(load_part, part_class=PreTrainedTokenizerFast)


@dataclass(frozen=True)
class FamilyData:
    """What differs between families without code of theirs.

    Attributes:
        model_class: the transformers class.
        conversation: default of `model.conversation`.
        types: valid `model_type` of a checkpoint's config.json; empty: that of the class's own configuration.
        renames: from patterns of a release's tensor names to the library's; empty: the library knows the names.
        loads_shared: whether the library loads weights by its plan for processes that share layers
            (`model.parallel=tensor`).
        self_described: whether a checkpoint alone describes the model; other families need a file in conf/model.
        processor_class: loads the checkpoint's processor.
        part_classes: classes that load parts of it, by their names, in place of the library's.
        tokenizer: loads the tokenizer of a release that has no processor.
        fixed: values that the config.json of a release has, if stated, where the library's modules compute the same.
        settings: valid keys of `model.processor`; each has its place in the processor, "" if code of the family reads
            it, and its type.
        vision: builds the tower's part of the configuration for random weights.
        text: builds that of the text stack; None: there are no random weights.
        config: other arguments of this configuration.
        token_ids: special tokens by the keys of this configuration for their numbers.
        processor: builds the processor for random weights.
        special: special tokens of the tokenizer for random weights.
        named_tokens: special tokens by the names that the processor reads from that tokenizer.
        decoder: path of the text stack in the model.
        layer_types: returns the types of the decoder's layers; None: masks and tables of all layers are alike.
        tower: path of the vision tower in the model.
        blocks: path of the layers in the tower.
        attention: name of the attention in one of these layers.
        projector: path of the module that maps tower features to the decoder's width.
        attentions: valid `model.attention`; empty: all.
        masks: why others are not, after the name of the model in the error line.
        takes_video: whether chats may hold videos.
        one_placeholder: whether it stands for pictures and for videos, so that a batch may hold only one kind.
        library_positions: of Qwen's towers, whether the library's position ids are the release's, also for videos.
        class_tokens: of these towers, tokens for each picture or frame besides its patches.
        row_newlines: of LLaVA's videos, whether a newline token follows each row of each frame, not the video alone.
        media: default template of media in a turn.
        joins: templates of media by `model.join`.
        placeholders: texts that the processor replaces with the tokens of a picture or a video.
        inline: placeholder of a picture if texts may mark the position of pictures, as in lmms-eval's class; else None.
        pieces: how the original code tokenises a prompt (harness/tools/benchmarks/checkpoint_prompts.py): at once, or
            each piece between placeholders alone; `begun` prompts hold the begin token as text.
        clean: changes an answer as the release's evaluation does.
        unplaced: whether visual tokens have no place in the picture, so that they cannot be drawn on it.
        lacking: for models without a file in conf/model, the signals that the family's code cannot produce.
        patch_tokens: for these models, whether each visual token is one patch of the tower.
    """

    model_class: Any
    conversation: str
    types: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    loads_shared: bool = True
    self_described: bool = True
    processor_class: Any = AutoProcessor
    part_classes: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Callable[[ModelSpec], Any] = FAST
    fixed: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    vision: Built = field(default_factory=vision_config)
    text: Built | None = field(default_factory=text_config)
    config: Mapping[str, Value] = field(default_factory=dict)
    token_ids: Mapping[str, str] = field(default_factory=lambda: {"image_token_id": MARK})
    processor: Any = None
    special: Sequence[str] = SPECIAL
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    decoder: str = "model.language_model"
    layer_types: Callable[[Any], LayerTypes] | None = None
    tower: str = "model.vision_tower"
    blocks: str = "encoder.layers"
    attention: str = "self_attn"
    projector: str = "model.multi_modal_projector"
    attentions: tuple[str, ...] = ()
    masks: str = ""
    takes_video: bool = False
    one_placeholder: bool = False
    library_positions: bool = False
    class_tokens: int = 0
    row_newlines: bool = False
    media: str = TAGGED
    joins: Mapping[str, str] = field(default_factory=dict)
    placeholders: tuple[str, ...] = (MARK,)
    inline: str | None = MARK
    pieces: Literal["whole", "alone", "begun"] = "whole"
    clean: Callable[[str], str] = str
    unplaced: bool = False
    lacking: tuple[str, ...] = ()
    patch_tokens: bool = False


class Adapter(ModelParts):
    """The facts of one model family: its modules, its visual positions, how it encodes a chat.

    A family implements the abstract methods; the other methods have defaults that suit most families.

    Args:
        model: a transformers model with `generate`.
        processor: the processor of the model.
        spec: the model's part of the run.
    """

    #: What the family states without code.
    data: ClassVar[FamilyData]

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Set inference mode on the model, and left padding and the run's template on the processor."""
        self.model = model.eval()
        self.processor = processor
        self.spec = spec
        self.facts = spec.facts
        if spec.facts.diffusion is not None:
            # The library and harness/engine/layout.py read from here that attention is bidirectional.
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
        self.shipped_template: str | None = template_of_processor(
            processor, self.data.self_described
        )
        processor.chat_template = self._run_template()

    @classmethod
    def format(cls, name: str | None, join: str | None = None, thinking: bool = False) -> str:
        """Return the chat template of a format and a media rule; None: the family's default.

        With `thinking`, prompts ask for reasoning, where the format has words for it.

        Raises:
            UserError: an unknown format or rule.
        """
        return template_of(name or cls.data.conversation, cls.format_of_media(join), thinking)

    @classmethod
    def format_of_media(cls, join: str | None = None) -> str:
        """Return the template of the pictures, videos and texts of a turn."""
        return join_of(join, cls.data.joins) or cls.data.media

    # ------------------------------------------------------------------ loading

    @classmethod
    def check_settings(cls, spec: ModelSpec) -> None:
        """Raise UserError for keys and values of `model.processor`, and attention, that this family does not take."""
        for name in sorted(set(spec.processor) - set(cls.data.settings)):
            raise unknown_name("model.processor", name, tuple(cls.data.settings) or ("nothing",))
        cls.processor_settings(spec)
        if cls.data.attentions and spec.attention not in cls.data.attentions:
            raise UserError(
                f"model.attention={spec.attention!r}: model={spec.name!r} {cls.data.masks}; valid: "
                f"{', '.join(cls.data.attentions)}"
            )

    @classmethod
    def processor_settings(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return `model.processor` in the types of the family's settings."""
        return gather(
            {
                name: (f"model.processor.{name}", value, cls.data.settings[name][1])
                for name, value in spec.processor.items()
            }
        )

    @classmethod
    def types(cls) -> tuple[str, ...]:
        """Return the valid `model_type` values of the family's checkpoints."""
        return cls.data.types or (cls.data.model_class.config_class.model_type,)

    @classmethod
    def class_of(cls, config: Any) -> Any:
        """Return the transformers class that a configuration builds."""
        return cls.data.model_class

    @property
    def unproved(self) -> Mapping[str, str]:
        """Kinds of site where methods may not act on a model without a file in conf/model, and why; default: none."""
        return {}

    def verify(self) -> None:
        """Check the loaded model by answers; families with tests need no check."""

    @classmethod
    def check_config(cls, config: Any, spec: ModelSpec) -> None:
        """Raise UserError for a configuration of the class that the family's code cannot run; default: for none."""

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the configuration to load a checkpoint with; default: the checkpoint's."""
        config = load_part(spec, cls.data.model_class.config_class)
        cls.check_config(config, spec)
        return config

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the processor of a checkpoint, with the settings of `model.processor`."""
        processor = load_part(spec, cls.data.processor_class)
        for name, part_class in cls.data.part_classes.items():
            setattr(processor, name, load_part(spec, part_class))
        return cls.adopt_processor(processor, spec)

    @classmethod
    def adopt_processor(cls, processor: Any, spec: ModelSpec) -> Any:
        """Return a processor with the settings of `model.processor` at their places; others stay unchanged."""
        for name, value in cls.processor_settings(spec).items():
            holder, _, key = cls.data.settings[name][0].rpartition(".")
            if holder.endswith("size"):
                attrgetter(holder)(processor)[key] = value
            elif holder:
                setattr(attrgetter(holder)(processor), key, value)
        return processor

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the transformers configuration built from `model.facts` and `model.architecture`."""
        data = cls.data
        arguments = {
            "vision_config": data.vision,
            "text_config": data.text,
            **data.config,
            **{key: token_id(token) for key, token in data.token_ids.items()},
        }
        build = Built(data.model_class.config_class, arguments, ("architecture.model",))
        config = build(spec, tokenizer)
        cls.check_config(config, spec)
        return config

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return a processor around `tokenizer`, for a model without a checkpoint."""
        tokenizer._set_model_specific_special_tokens(dict(cls.data.named_tokens))
        return cls.adopt_processor(cls.data.processor(spec, tokenizer), spec)

    # ------------------------------------------------------------------ parts

    @property
    def decoder(self) -> Any:
        """The text stack."""
        return attrgetter(self.data.decoder)(self.model)

    @cached_property
    def layer_types(self) -> LayerTypes | None:
        """The types of the decoder's layers; None if masks and tables of all layers are alike."""
        return None if self.data.layer_types is None else self.data.layer_types(self.decoder)

    @property
    def tower(self) -> Any:
        """The vision tower."""
        return attrgetter(self.data.tower)(self.model)

    @property
    def projector(self) -> Any:
        """The module that maps tower features to the decoder's width."""
        return attrgetter(self.data.projector)(self.model)

    def patches(self) -> int:
        """Return the patches of the tower along the edge of a square view."""
        vision = self.model.config.vision_config
        return edge_of(vision.image_size) // edge_of(vision.patch_size)

    def pixel_grids(self, views: Tensor, side: int) -> PixelGrids:
        """Return square views (n, 3, S, S) as the tower gets them, each divided into side x side units."""
        patch = edge_of(self.model.config.vision_config.patch_size)
        return PixelGrids([views], [side], patch * (self.patches() // side), *self.colours())

    def tower_attention(self, index: int | None) -> Any:
        """Return the attention of a tower layer; by default, of the last."""
        layers = attrgetter(self.data.blocks)(self.tower)
        return getattr(layers[-1 if index is None else index], self.data.attention)

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

    def prepare(self, chats: Sequence[Chat]) -> Mapping[str, Any]:
        """Return chats as one left-padded batch on the CPU.

        Args:
            chats: each a list of {"role", "content": [part, ...]} with parts {"type": "image", "image": picture},
                {"type": "video", "video": file} and {"type": "text", "text": str}.

        Raises:
            UserError: a chat without media under `model.media=required`, a picture or video that cannot be read, a
                prompt longer than the model's context.
        """
        if not self.data.takes_video:
            refuse_videos(chats, self.spec.name)
        required = self.spec.media == "required"
        chat_media = [self.load_media(chat, n, required) for n, chat in enumerate(chats)]
        texts = [
            self.prompt_text(chat, media) for chat, media in zip(chats, chat_media, strict=True)
        ]
        batch = self.process_batch(texts, chat_media)
        limit = getattr(self.decoder.config, "max_position_embeddings", None)
        check_context(batch["attention_mask"], limit, self.spec.name)
        return cast("Mapping[str, Any]", batch)

    def process_batch(self, texts: list[str], media: Sequence[Media]) -> Any:
        """Run the family's processor on prompts.

        Raises:
            UserError: the batch holds pictures and videos under one placeholder; a picture or video that the processor
                refuses, with its size.
        """
        pictures, clips = [m.pictures for m in media], [m.clips for m in media]
        if self.data.one_placeholder and any(pictures) and any(clips):
            raise UserError(
                f"pictures and videos in one batch: {type(self.model).__name__} of model={self.spec.name!r} has one "
                "placeholder for both and refuses them; valid: engine.batch_size=1, and one kind in a chat"
            )
        try:
            return self.process(texts, pictures, clips)
        except UserError:
            raise
        except UNFIT as error:
            for number, (text, chat_media) in enumerate(zip(texts, media, strict=True)):
                try:
                    self.process([text], [chat_media.pictures], [chat_media.clips])
                except UNFIT as refusal:
                    where = f"chat {number} of the batch: "
                    raise refusal_error(
                        where, chat_media, self.processor, self.spec.name, refusal
                    ) from error
            raise

    def load_media(self, chat: Chat, number: int = 0, required: bool = False) -> Media:
        """Return a chat's pictures and clips, opened with `model.video` and `model.transparency`; see `media_of`."""
        return media_of(number, chat, self.spec.video, required, self.spec.transparency)

    def prompt_text(self, chat: Chat, media: Media) -> str:
        """Return the prompt of a chat for the processor; `media` are the chat's pictures and clips."""
        return self.render(place_media(chat, self.data.placeholders, self.data.inline))

    def render(self, chat: Chat) -> str:
        """Return a chat as one string with a placeholder for each image and video.

        Raises:
            UserError: the checkpoint's template fails on the chat, or makes too long a text.
        """
        processor, spec = self.processor, self.spec
        options = thinking_options(spec, processor.chat_template)
        try:
            text = processor.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, **options
            )
            return limited(str(text))
        except FAILURES as error:
            if spec.conversation != CHECKPOINT:
                raise
            raise UserError(
                f"model.conversation={CHECKPOINT!r}: the chat template of model={spec.name!r}: "
                f"{failure_words(error)}; valid: null for the family's own, {self.data.conversation}"
            ) from error

    def _run_template(self) -> str:
        """Return the chat template that the prompts of the run follow.

        Raises:
            UserError: `model.conversation=checkpoint`, and the checkpoint has no template.
        """
        spec = self.spec
        if spec.conversation != CHECKPOINT:
            return self.format(
                spec.conversation, spec.prompt.join, bool(thinking_of(spec).prompted)
            )
        template = self.shipped_template or local_template(spec)
        if template is None:
            raise UserError(
                f"model.conversation={CHECKPOINT!r}: model={spec.name!r} comes without a chat template; "
                f"valid: null for the family's own, {self.data.conversation}"
            )
        if takes_parts(template):
            return template
        return flatten_template(template, self.format_of_media(spec.prompt.join))

    def prompt_summary(self, chat: Chat) -> dict[str, str | None]:
        """Return the prompt of a chat and the hashes of its template and the checkpoint's, as stored in a result."""
        return {
            "rendered": self.prompt_text(chat, self.load_media(chat)),
            "template_sha256": sha256_of(self.processor.chat_template),
            "checkpoint_template_sha256": sha256_of(self.shipped_template),
            **({"positions": ORDER} if self.facts.rotary_axes > 1 else {}),
        }

    def view_box(self, view: PictureView) -> ViewBox:
        """Return the area of a view on its picture, which is stretched to it: the whole for view 0, else a tile."""
        if view.index == 0:
            return WHOLE
        rows, columns = self.tiles_of(view)
        return WHOLE.cell(*divmod(view.index - 1, columns), rows, columns)

    def tiles_of(self, view: PictureView) -> tuple[int, int]:
        """Return the rows and columns of tiles into which the picture of a view is cut; default: one tile."""
        return 1, 1

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the family's processor on prompts with the pictures and clips of each."""
        return self.run_processor(texts, images=pictures if any(pictures) else None)

    def process_in_order(
        self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]
    ) -> Any:
        """Return one batch of prompts with the pictures and clips of each, in the order of their placeholders.

        The last frame of a clip with an odd number of frames is repeated, since two frames form one time step.
        """
        images, videos = list(chain(*pictures)), list(chain(*clips))
        batch = self.run_processor(
            texts,
            images=images or None,
            videos=[clip.pixels for clip in videos] or None,
            video_metadata=[clip.metadata() for clip in videos] or None,
            do_sample_frames=False,
        )
        if "second_per_grid_ts" in batch:
            # As numbers, because a tensor would be cast to the model's dtype, which rounds times to a few bits.
            batch["second_per_grid_ts"] = batch["second_per_grid_ts"].tolist()
        return batch

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
        return [self.data.clean(f"{self.answer_lead}{text.strip()}") for text in texts]

    @cached_property
    def answer_lead(self) -> str:
        """The tag by which prompts open the reasoning of answers; "" for prompts without one."""
        if "think" not in self.processor.chat_template:
            return ""
        turn = {"role": "user", "content": [{"type": "text", "text": "?"}]}
        return opened_by(self.render([turn]))
