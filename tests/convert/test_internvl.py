"""Tiny releases of InternVL, under the original names, become checkpoints that answer as the model they hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor
from tokenizers import pre_tokenizers
from torch import Tensor

from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.random_weights import byte_tokenizer
from espalier.harness.specs.run_spec import ModelSpec
from espalier.harness.tools.convert import convert_internvl as conversion
from espalier.harness.tools.convert.checkpoint_writer import split_rows
from espalier.harness.tools.convert.convert_internvl import configuration, read_prompt
from tests.convert.tokenizers import piece_model, token
from tests.families.internvl import LLAMA, PHI, QWEN, QWEN3, ROPE, VIDEOS
from tests.tiny import SHAPES, chat, model_of, random_model

MEDIA = ("<img>", "</img>", "<IMG_CONTEXT>", "<box>", "</box>")
SYSTEM = 'You are a tree 树, and a "helpful" one.'
LONG = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 2.0, 4.0, 9.0]}

#: The release's chat formats, and how each writes a question by hand.
CHATML = ("<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>")
PHI3 = ("<|system|>\n", "<|user|>\n", "<|assistant|>\n", "<|end|>")


def clear(spec: ModelSpec, **text: Any) -> ModelSpec:
    """The same model with other facts of its text stack."""
    held = spec.architecture
    return replace(spec, architecture={**held, "text": {**held["text"], **text}})


STACKS = {
    "qwen2": (QWEN, CHATML, "Hermes-2"),
    # InternVL3 and InternVL3.5.
    "qwen2_5": (
        clear(QWEN, rope_parameters=ROPE),
        (*CHATML[:3], "<|im_end|>\n"),
        "internvl2_5",
    ),
    "qwen3": (QWEN3, (*CHATML[:3], "<|im_end|>\n"), "internvl2_5"),
    "internlm2": (clear(LLAMA, rope_parameters=ROPE), CHATML, "internlm2-chat"),
    "internlm2_5": (
        clear(LLAMA, rope_parameters=ROPE),
        (*CHATML[:3], "<|im_end|>\n"),
        "internvl2_5",
    ),
    "phi3": (
        clear(
            PHI,
            original_max_position_embeddings=2048,
            rope_parameters={"rope_type": "longrope", "rope_theta": 1.0e4, **LONG},
        ),
        PHI3,
        "phi3-chat",
    ),
}


# ---------------------------------------------------------------------- tiny releases


def write_tokenizer(folder: Path, kind: str, **options: Any) -> int:
    """Write a release's tokenizer files; return how many tokens it has."""
    if kind in ("qwen2", "qwen3"):
        letters = {
            letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
        }
        (folder / "vocab.json").write_text(json.dumps(letters))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        names, first = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *MEDIA), len(letters)
        added = {first + n: token(name) for n, name in enumerate(names)}
        config = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "unk_token": None}
        config |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    else:
        # Pieces 3 and 4 are reserved; InternLM2 gives them other names.
        reserved = ("[UNUSED_TOKEN_145]", "[UNUSED_TOKEN_146]")
        (folder / "tokenizer.model").write_bytes(piece_model(reserved, **options))
        count = SentencePieceProcessor(str(folder / "tokenizer.model")).get_piece_size()
        added = {n: token(name) for n, name in enumerate(("<unk>", "<s>", "</s>"))}
        config = {"bos_token": "<s>", "unk_token": token("<unk>"), "eos_token": "</s>"}
        if kind == "phi3":
            names = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", *MEDIA)
            config |= {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
            config["pad_token"] = "<|endoftext|>"
        else:
            names = MEDIA
            added |= {3: token("<|im_end|>"), 4: token("<|im_start|>")}
            config |= {"tokenizer_class": "InternLM2Tokenizer", "pad_token": "</s>"}
            config["auto_map"] = {"AutoTokenizer": ["tokenization_internlm2.Unknown", None]}
        turns = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
        added |= {count + n: token(name, rstrip=name in turns) for n, name in enumerate(names)}
    config["added_tokens_decoder"] = {str(number): entry for number, entry in added.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return max(added) + 1


def write_format(folder: Path, name: str, texts: tuple[str, ...]) -> None:
    """Write a conversation.py that must not be run."""
    system, user, assistant, end = texts
    call = (
        f"register(Conversation(name={name!r}, system_template={system + '{system_message}'!r},\n"
        f"    # system_message='another',\n    system_message={SYSTEM!r}, roles=({user!r}, {assistant!r}),\n"
        f"    sep_style=SeparatorStyle.MPT, sep={end!r}, stop_token_ids=[2]))\n"
    )
    other = call.replace(name, "other").replace("You are", "I am")
    (folder / "conversation.py").write_text(f"raise SystemExit('run')\n{other}{call}")


def original(tensors: dict[str, Tensor], kind: str, config: Any) -> dict[str, Tensor]:
    """Name and fuse the model's tensors as the releases do, block by block."""
    text, vision = config.text_config, config.vision_config
    left = dict(tensors)
    renamed: dict[str, Tensor] = {}

    def move(old: str, new: str) -> None:
        for end in (".weight", ".bias", ""):
            if old + end in left:
                renamed[new + end] = left.pop(old + end)

    for old, new in (
        ("cls_token", "class_embedding"),
        ("position_embeddings", "position_embedding"),
        ("patch_embeddings.projection", "patch_embedding"),
    ):
        move(f"model.vision_tower.embeddings.{old}", f"vision_model.embeddings.{new}")
    for n in range(vision.num_hidden_layers):
        old, new = f"model.vision_tower.encoder.layer.{n}.", f"vision_model.encoder.layers.{n}."
        for end in ("weight", "bias"):
            if f"{old}attention.q_proj.{end}" in left:
                parts = [left.pop(f"{old}attention.{part}_proj.{end}") for part in "qkv"]
                renamed[f"{new}attn.qkv.{end}"] = torch.cat(parts)
        for old_part, new_part in (
            ("attention.projection_layer", "attn.proj"),
            ("attention.q_norm", "attn.q_norm"),
            ("attention.k_norm", "attn.k_norm"),
            ("layernorm_before", "norm1"),
            ("layernorm_after", "norm2"),
            ("lambda_1", "ls1"),
            ("lambda_2", "ls2"),
            ("mlp.fc1", "mlp.fc1"),
            ("mlp.fc2", "mlp.fc2"),
        ):
            move(old + old_part, new + new_part)
    for number, name in (("0", "layer_norm"), ("1", "linear_1"), ("3", "linear_2")):
        move(f"model.multi_modal_projector.{name}", f"mlp1.{number}")
    if kind.startswith("internlm2"):
        heads, groups = text.num_attention_heads, text.num_key_value_heads
        size, share = text.hidden_size // heads, heads // groups
        for n in range(text.num_hidden_layers):
            old, new = f"model.language_model.layers.{n}.", f"language_model.model.layers.{n}."
            query, key, value = (left.pop(f"{old}self_attn.{part}_proj.weight") for part in "qkv")
            rows = []
            for group in range(groups):
                rows += [
                    query[h * size : (h + 1) * size]
                    for h in range(group * share, (group + 1) * share)
                ]
                rows += [weight[group * size : (group + 1) * size] for weight in (key, value)]
            renamed[f"{new}attention.wqkv.weight"] = torch.cat(rows)
            for old_part, new_part in (
                ("self_attn.o_proj", "attention.wo"),
                ("mlp.gate_proj", "feed_forward.w1"),
                ("mlp.up_proj", "feed_forward.w3"),
                ("mlp.down_proj", "feed_forward.w2"),
                ("input_layernorm", "attention_norm"),
                ("post_attention_layernorm", "ffn_norm"),
            ):
                move(old + old_part, new + new_part)
        for old, new in (
            ("model.language_model.embed_tokens", "model.tok_embeddings"),
            ("model.language_model.norm", "model.norm"),
            ("lm_head", "output"),
        ):
            move(old, f"language_model.{new}")
    else:
        move("lm_head", "language_model.lm_head")
        for name in [name for name in left if name.startswith("model.language_model.")]:
            renamed[f"language_model.model.{name.removeprefix('model.language_model.')}"] = (
                left.pop(name)
            )
    assert not left
    return renamed


def release_config(kind: str, config: Any, name: str) -> dict[str, Any]:
    text, vision = config.text_config, config.vision_config
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps")
    same += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "hidden_act")
    llm = {key: getattr(text, key) for key in same} | {"bos_token_id": 1, "eos_token_id": 2}
    llm |= {"model_type": kind.removesuffix("_5"), "tie_word_embeddings": False, "bias": False}
    llm["rope_theta"] = text.rope_parameters["rope_theta"]
    llm["rope_scaling"] = None
    if text.rope_parameters["rope_type"] == "dynamic":
        llm["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    if kind == "qwen2_5":
        llm["rope_scaling"]["rope_type"] = "dynamic"
    if kind == "qwen3":
        llm |= {"head_dim": text.head_dim, "attention_bias": False}
    if kind.startswith("qwen"):
        llm |= {"use_sliding_window": False, "sliding_window": 32768}
    if kind == "phi3":
        llm |= {"rope_scaling": {"type": "su", **LONG}, "original_max_position_embeddings": 2048}
        llm["sliding_window"] = 262144
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("norm_type", "layer_norm_eps", "hidden_act")
    tower = {key: getattr(vision, key) for key in keys}
    tower |= {"image_size": vision.image_size[0], "patch_size": vision.patch_size[0]}
    tower |= {"qkv_bias": vision.attention_bias, "qk_normalization": vision.use_qk_norm}
    return {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": tower["image_size"],
        "llm_config": llm,
        "max_dynamic_patch": 6,
        "min_dynamic_patch": 1,
        "ps_version": "v2",
        "select_layer": -1,
        "template": name,
        "use_thumbnail": True,
        "vision_config": {**tower, "model_type": "intern_vit_6b"},
    }


def release(folder: Path, kind: str, dtype: str = "float32") -> tuple[Any, ModelSpec]:
    """Write a tiny release; return the model that it holds, and its spec."""
    folder.mkdir(parents=True)
    spec, texts, name = STACKS[kind]
    count = write_tokenizer(folder, kind.removesuffix("_5"))
    # A release's embedding may be larger than its tokenizer.
    spec = replace(spec, dtype=dtype, facts=replace(spec.facts, vocabulary=count + 5))
    model = random_model(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.std() == 0 or parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(5.0)
    held = original(model.state_dict(), kind, model.config)
    names = sorted(held)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file(
            {n: held[n].contiguous() for n in part}, folder / f"model-{number}-of-2.safetensors"
        )
    (folder / "config.json").write_text(json.dumps(release_config(kind, model.config, name)))
    write_format(folder, name, texts)
    return model.eval(), spec


def converted(source: Path, spec: ModelSpec, folder: Path) -> Adapter:
    conversion.convert(source, folder, lambda line: None)
    # The chat format that the release tells, not the family's.
    spec = replace(spec, path=folder, weights="trained", conversation="checkpoint")
    return load_adapter(replace(spec, processor={"max_patches": 6}))


def alter(source: Path, change: Any) -> None:
    """Change the first shard's tensors in place."""
    file = source / "model-1-of-2.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit(file: Path, **changes: Any) -> None:
    """Change entries of a JSON file; `block__key` reaches inside a block."""
    held = json.loads(file.read_text(encoding="utf-8"))
    for name, value in changes.items():
        *blocks, key = name.split("__")
        place = held
        for block in blocks:
            place = place[block]
        place[key] = value
    file.write_text(json.dumps(held), encoding="utf-8")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A release of InternLM2 to damage."""
    release(tmp_path / "release", "internlm2")
    return tmp_path / "release"


def refusal(source: Path) -> str:
    target = source.parent / "refused"
    with pytest.raises(UserError) as caught:
        conversion.convert(source, target, lambda line: None)
    assert not target.exists()
    return str(caught.value)


# ---------------------------------------------------------------------- the same model


@pytest.mark.sampled(24)
@pytest.mark.parametrize("kind", STACKS)
def test_a_converted_release_answers_as_the_model_it_holds(tmp_path: Path, kind: str) -> None:
    model, spec = release(tmp_path / "release", kind)
    adapter = converted(tmp_path / "release", spec, tmp_path / "out")
    model.config.image_token_id = adapter.model.config.image_token_id
    model.model.config.image_token_id = adapter.model.config.image_token_id
    inputs = adapter.encode([*SHAPES, *VIDEOS])
    with torch.inference_mode():
        expected = model(**inputs).logits
        assert torch.equal(adapter.model(**inputs).logits, expected)
    assert expected.std() > 0.1
    mixed = dict(adapter.model.named_parameters())
    assert mixed.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(mixed[name], value) for name, value in model.named_parameters())


def test_grouped_rows_are_taken_apart_head_by_head() -> None:
    """Rows are numbered by (key head, slot, row): two key heads with two query heads each, of three rows."""
    fused = torch.arange(2 * 4 * 3).float().view(-1, 1).expand(-1, 5)
    rows = {"q": 12, "k": 6, "v": 6}
    parts = split_rows(fused, rows, groups=2)
    assert {name: part[:, 0].tolist() for name, part in parts.items()} == {
        "q": [*range(6), *range(12, 18)],
        "k": [6, 7, 8, 18, 19, 20],
        "v": [9, 10, 11, 21, 22, 23],
    }
    assert {name: len(part) for name, part in parts.items()} == rows
    assert split_rows(fused[1:], rows, groups=2).keys() == {"q"}


def test_data_types_stay_and_one_shard_becomes_one(tmp_path: Path) -> None:
    release(tmp_path / "release", "internlm2", dtype="bfloat16")
    lines: list[str] = []
    conversion.convert(tmp_path / "release", tmp_path / "out", lines.append)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 2
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert lines[0].startswith("1/2 model-1-of-2.safetensors")
    assert f"model.path={tmp_path / 'out'}" in lines[-1]


def test_an_output_head_tied_to_the_embedding_may_be_absent(tmp_path: Path) -> None:
    model, spec = release(tmp_path / "release", "qwen2")
    for file in (tmp_path / "release").glob("*.safetensors"):
        tensors = load_file(file)
        tensors.pop("language_model.lm_head.weight", None)
        save_file(tensors, file)
    assert "output head" in refusal(tmp_path / "release")
    edit(tmp_path / "release" / "config.json", llm_config__tie_word_embeddings=True)
    tied = {**spec.architecture["model"], "tie_word_embeddings": True}
    spec = replace(spec, architecture={**spec.architecture, "model": tied})
    adapter = converted(tmp_path / "release", spec, tmp_path / "out")
    assert torch.equal(adapter.model.lm_head.weight, model.model.language_model.embed_tokens.weight)


# ---------------------------------------------------------------------- the same tokens


@pytest.mark.sampled
@pytest.mark.parametrize("kind", STACKS)
def test_a_chat_is_written_as_the_release_writes_it(tmp_path: Path, kind: str) -> None:
    _, spec = release(tmp_path / "release", kind)
    adapter = converted(tmp_path / "release", spec, tmp_path / "out")
    system, user, assistant, end = STACKS[kind][1]
    start = f"{system}{SYSTEM}{end}{user}"
    # Llama's tokenizer puts a space before the first special token of a text.
    lead = " " if kind == "phi3" else ""
    prompt = adapter.render(chat("is it?", 0, 1))
    numbered = "Image-1: <IMG_CONTEXT>\nImage-2: <IMG_CONTEXT>\n"
    assert prompt == f"{lead}{start}{numbered}is it?{end}{assistant}"
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    several = adapter.processor.apply_chat_template(turns, add_generation_prompt=False)
    assert several == f"{lead}{system}s{end}{user}q{end}{assistant}a{end}"
    config = adapter.model.config
    tokenizer = adapter.processor.tokenizer
    names = json.loads((tmp_path / "release" / "tokenizer_config.json").read_text())[
        "added_tokens_decoder"
    ]
    for number, entry in names.items():
        assert tokenizer.convert_tokens_to_ids(entry["content"]) == int(number)
    assert config.image_token_id == next(
        int(n) for n, entry in names.items() if entry["content"] == "<IMG_CONTEXT>"
    )
    stop = adapter.model.generation_config.eos_token_id
    assert stop == tokenizer.convert_tokens_to_ids(end.strip())
    ids = adapter.encode([chat("is it?", 0)])["input_ids"]
    assert ids.max() < config.text_config.vocab_size
    assert (ids[0, 0] == tokenizer.bos_token_id) == (not kind.startswith("qwen"))


@pytest.mark.sampled
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(
    "text",
    ["what is the word", "  two  spaces ", "树\n\n🙂 1234", "x\ty\u200b", "in this picture here"],
)
def test_ids_of_internlm2_are_those_of_sentencepiece(
    tmp_path: Path, text: str, prefix: bool
) -> None:
    release(tmp_path / "release", "internlm2")
    write_tokenizer(tmp_path / "release", "internlm2", add_dummy_prefix=prefix)
    conversion.convert(tmp_path / "release", tmp_path / "out", lambda line: None)
    tokenizer = (
        ADAPTERS.load("internvl").load_processor(replace(LLAMA, path=tmp_path / "out")).tokenizer
    )
    pieces = SentencePieceProcessor(str(tmp_path / "release" / "tokenizer.model"))
    ids = tokenizer(f"{text}<|im_start|>{text}<IMG_CONTEXT>").input_ids
    context = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    assert ids == [1, *pieces.encode(text), 4, *pieces.encode(text), context]
    assert tokenizer.decode(pieces.encode(text)) == pieces.decode(pieces.encode(text))


def test_ids_of_phi3_lose_white_space_after_special_tokens(tmp_path: Path) -> None:
    """Llama's later tokenizer puts a space before the text alone; Phi-3's special tokens swallow what follows."""
    release(tmp_path / "release", "phi3")
    conversion.convert(tmp_path / "release", tmp_path / "out", lambda line: None)
    tokenizer = (
        ADAPTERS.load("internvl").load_processor(replace(PHI, path=tmp_path / "out")).tokenizer
    )
    pieces = SentencePieceProcessor(str(tmp_path / "release" / "tokenizer.model"))
    space, user = pieces.piece_to_id("\u2581"), tokenizer.convert_tokens_to_ids("<|user|>")
    letters = [pieces.piece_to_id(letter) for letter in "w1"]
    assert tokenizer(" <|user|>\n w1").input_ids[:3] == [1, space, user]
    assert tokenizer(" <|user|>\n w1").input_ids[3:] == letters
    assert tokenizer("w1").input_ids == [1, *pieces.encode("w1")]
    assert pieces.encode("w1") != letters


# ---------------------------------------------------------------------- refusals


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(sorted(t)[0]), "lacks"),
        (
            lambda t: t.update({"language_model.lora": torch.zeros(2)}),
            "'language_model.lora'.*unknown",
        ),
        (
            lambda t: t.update({"vision_model.head.weight": torch.zeros(2)}),
            "vision_model.head.*unknown",
        ),
        (
            lambda t: t.update(
                {"language_model.model.layers.0.attention.wqkv.weight": torch.zeros(60, 32)}
            ),
            r"wqkv.weight' of the release has shape \(60, 32\)",
        ),
        (
            lambda t: t.update(
                {"vision_model.encoder.layers.0.attn.qkv.weight": torch.zeros(96, 31)}
            ),
            r"attn.qkv.weight' of the release has shape \(96, 31\)",
        ),
        (lambda t: t.update({"mlp1.0.weight": torch.zeros(127)}), r"mlp1.0.weight.*\(127,\)"),
    ],
    ids=["missing", "extra", "extra in the tower", "grouped", "fused", "shape"],
)
def test_tensors_must_be_those_of_the_model(source: Path, change: Any, words: str) -> None:
    for file in source.glob("*.safetensors"):
        if file.name != "model-1-of-2.safetensors":
            tensors = load_file(source / "model-1-of-2.safetensors") | load_file(file)
            file.unlink()
            save_file(tensors, source / "model-1-of-2.safetensors")
    alter(source, change)
    with pytest.raises(UserError, match=words):
        conversion.convert(source, source.parent / "refused", lambda line: None)
    assert not (source.parent / "refused").exists()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        *(
            ("config", changes, words)
            for changes, words in (
                (
                    {"model_type": "llava"},
                    "model_type='llava' cannot be converted; valid: 'internvl_chat'",
                ),
                ({"ps_version": "v1"}, "ps_version='v1'"),
                ({"use_thumbnail": False}, "use_thumbnail=False"),
                ({"force_image_size": 224}, "force_image_size=224"),
                ({"llm_config": None}, "no 'llm_config'"),
                ({"llm_config__model_type": "gpt2"}, "valid: internlm2, qwen2, qwen3, phi3"),
                (
                    {"llm_config__rope_scaling": {"type": "linear", "factor": 2.0}},
                    "valid: none, dynamic",
                ),
                ({"llm_config__use_sliding_window": True}, "sliding window"),
                ({"llm_config__hidden_size": "wide"}, "config.json cannot be converted ("),
                ({"llm_config__vocab_size": 100}, "tokens, the release's embedding 100 rows"),
                ({"vision_config": {}}, "vision_config has no 'hidden_size'"),
                ({"template": "vicuna"}, "describes no chat format 'vicuna'"),
            )
        ),
        *(
            ("tokenizer_config", changes, words)
            for changes, words in (
                (
                    {"tokenizer_class": "GPT2Tokenizer"},
                    "tokenizer_class='GPT2Tokenizer' cannot be converted",
                ),
                ({"added_tokens_decoder__900": token("<far>")}, "'<far>' has id 900"),
                ({"added_tokens_decoder__4": token("<|start|>")}, "no token '<|im_start|>'"),
                ({"added_tokens_decoder__3": token("<img>")}, "token '<img>' has two ids"),
            )
        ),
    ],
)
def test_what_the_converter_does_not_know_is_refused(
    source: Path, file: str, changes: dict, words: str
) -> None:
    edit(source / f"{file}.json", **changes)
    assert words in refusal(source)


def test_releases_without_their_files_are_refused(source: Path) -> None:
    for name, words in (
        ("tokenizer.model", "no sentencepiece model"),
        ("tokenizer_config.json", "no usable tokenizer_config.json"),
        ("conversation.py", "names no chat format"),
        ("config.json", "no usable config.json"),
    ):
        (source / name).rename(source / f"{name}.away")
        assert words in refusal(source)
        (source / f"{name}.away").rename(source / name)
    for file in source.glob("*.safetensors"):
        file.unlink()
    assert "holds no *.safetensors" in refusal(source)


def test_tokens_of_the_chat_format_must_be_there(source: Path) -> None:
    write_format(source, "internlm2-chat", (*CHATML[:3], "<|over|>"))
    assert "no token '<|over|>'" in refusal(source)


def test_a_sentencepiece_model_that_normalises_is_refused(source: Path) -> None:
    options = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
    write_tokenizer(source, "internlm2", **options)
    assert "it normalises texts" in refusal(source)


def test_a_chat_format_of_another_style_is_refused(source: Path) -> None:
    file = source / "conversation.py"
    file.write_text(file.read_text().replace("SeparatorStyle.MPT", "SeparatorStyle.LLAMA2"))
    assert "valid: sep_style MPT" in refusal(source)
    with pytest.raises(UserError, match="no chat format 'nothing'"):
        read_prompt(file, "nothing")


def test_the_command_line_reports_and_refuses_in_one_line(source: Path, capsys) -> None:
    target = source.parent / "out"
    assert conversion.main([str(source), str(target)]) == 0
    assert "done:" in capsys.readouterr().out
    assert conversion.main([str(source), str(target)]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error:")
    assert "is not empty" in line
    assert line.count("\n") == 1


# ---------------------------------------------------------------------- the config files


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["internvl2_1b", "internvl2_4b", "internvl2_8b", "internvl2_26b", "internvl2_5_8b"]
)
def test_a_release_loaded_without_conversion_names_the_command(source: Path, name: str) -> None:
    spec = model_of(f"model={name}", f"model.path={source}", "model.device=cpu")
    with pytest.raises(
        UserError, match=r"internvl_chat.*python -m espalier convert internvl"
    ) as caught:
        load_adapter(spec)
    assert str(caught.value).count("-hf") == 0


#: Published sizes: of the text stack (layers, width, MLP, heads, stretch) and of the tower (layers, width, MLP, heads).
PUBLISHED = {
    "internvl2_8b": ((32, 4096, 14336, 32, 2.0), (24, 1024, 4096, 16), "layer_norm"),
    "internvl2_26b": ((48, 6144, 16384, 48, 3.0), (45, 3200, 12800, 25), "rms_norm"),
}
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_architecture_of_the_config_file(name: str) -> None:
    (*text, factor), vision, norm = PUBLISHED[name]
    llm = dict(zip(_SIZES, text, strict=True)) | {"num_key_value_heads": 8, "vocab_size": 92553}
    llm |= {"model_type": "internlm2", "max_position_embeddings": 32768, "rms_norm_eps": 1e-05}
    llm |= {"hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    llm |= {"rope_theta": 1000000, "rope_scaling": {"factor": factor, "type": "dynamic"}}
    tower = dict(zip(_SIZES, vision, strict=True)) | {"norm_type": norm, "layer_norm_eps": 1e-06}
    tower |= {"image_size": 448, "patch_size": 14, "hidden_act": "gelu"}
    tower |= {"qkv_bias": norm == "layer_norm", "qk_normalization": norm == "rms_norm"}
    release = {"model_type": "internvl_chat", "ps_version": "v2", "downsample_ratio": 0.5}
    release |= {"dynamic_image_size": True, "use_thumbnail": True, "force_image_size": 448}
    built = configuration({**release, "llm_config": llm, "vision_config": tower}, 92546, True)
    spec = model_of(f"model={name}")
    stated = ADAPTERS.load(spec.adapter).configuration(spec, byte_tokenizer())
    assert built.vision_config.to_dict() == stated.vision_config.to_dict()
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    texts = [config.text_config.to_dict() for config in (built, stated)]
    plain, other = ({k: v for k, v in held.items() if k not in ids} for held in texts)
    assert plain == other
    for key in ("image_seq_length", "downsample_ratio", "vision_feature_layer"):
        assert getattr(built, key) == getattr(stated, key)
    assert built.tie_word_embeddings == stated.tie_word_embeddings
