from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from espalier.harness.seedling import weights_dir
from espalier.harness.seedling.scene_questions import FAMILIES, questions_for
from espalier.harness.seedling.scenes import Scenes, make_layout
from espalier.harness.seedling.vocabulary import ASSISTANT, BOS, EOS, IMAGE, VOCABULARY, encode
from lab.training import fast_math
from lab.training.dialogue_packs import (
    IGNORE,
    PREFIX,
    TEXT_START,
    pack,
    packed_hidden,
    use_packed_attention,
)
from lab.training.draft_stage import draft_from_target
from lab.training.fast_math import Bf16Linear, attend, use_bf16_products
from lab.training.greedy_scores import QuestionSet, greedy_answers, objects_first_keep, random_keep
from lab.training.language_losses import exact_answers, make_batch, random_subset, validate
from lab.training.patch_targets import patch_targets
from lab.training.release_stage import SUMS, load_exported, missed_targets
from lab.training.seedling_model import (
    NAMES,
    build_model,
    build_processor,
    file_sha256,
    normalise,
    save_model,
)
from lab.training.seedling_tower import patch_features, pooled_output
from lab.training.stage_runtime import Worker, load_checkpoint, save_checkpoint
from lab.training.tower_stage import tower_of

ONES = dict.fromkeys([*FAMILIES, "drill", "drill_later", "end"], 1.0)


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    return Scenes()


@pytest.fixture(scope="module")
def random_model():
    torch.manual_seed(0)
    return build_model("seedling_draft", init_range=0.1).eval()


def chat(text: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


def test_packing_equals_separate_prompts(scenes, random_model):
    """Hidden states of packed dialogues are those of one ordinary prompt per question."""
    scene = scenes.scene("val", 0, 0)
    questions = questions_for(scene, dict.fromkeys(FAMILIES, 1))
    packed = pack([questions], ONES)
    language = random_model.model.language_model
    features = patch_features(tower_of(random_model), normalise(scene.image[None]))[:, 1:]
    visual = random_model.model.multi_modal_projector(features)
    start = language.embed_tokens(torch.tensor([PREFIX]))
    ordinary = language.config._attn_implementation
    with torch.no_grad():
        use_packed_attention(language)
        together = packed_hidden(random_model, visual, packed)
        language.config._attn_implementation = ordinary
        for number in range(len(questions)):
            rows = packed.segments[0] == number
            words = language.embed_tokens(packed.tokens[:, rows])
            alone = language(inputs_embeds=torch.cat([start, visual, words], 1)).last_hidden_state
            torch.testing.assert_close(
                together[:, rows], alone[:, TEXT_START:], atol=1e-4, rtol=1e-4
            )


def test_labels_are_the_answer_and_its_end(scenes):
    questions = questions_for(scenes.scene("val", 0, 1), {"attr": 1, "ocr": 1})
    packed = pack([questions], ONES)
    for number, question in enumerate(questions):
        labels = packed.labels[0][packed.segments[0] == number]
        assert labels[labels != IGNORE].tolist() == [*encode(question.answer), EOS]
        tokens = packed.tokens[0][packed.segments[0] == number].tolist()
        assert tokens == [*encode(question.text), ASSISTANT, *encode(question.answer)]
    assert (packed.labels[packed.segments < 0] == IGNORE).all()


def test_tower_shortcuts_equal_the_whole_tower(random_model):
    tower = tower_of(random_model)
    pixels = torch.rand(2, 3, 96, 96)
    with torch.no_grad():
        outputs = tower(pixels, output_hidden_states=True)
        features = patch_features(tower, pixels)
        pooled = pooled_output(tower, features)
    torch.testing.assert_close(features, outputs.hidden_states[-2])
    torch.testing.assert_close(pooled, outputs.pooler_output)


def test_bf16_products_are_close_in_training_and_exact_otherwise(monkeypatch):
    monkeypatch.setattr(fast_math, "bf16_pays", lambda: True)
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 32)
    x = torch.randn(50, 64, requires_grad=True)
    exact = layer(x)
    exact.sum().backward()
    grad, weight_grad = x.grad.clone(), layer.weight.grad.clone()
    x.grad, layer.weight.grad, layer.bias.grad = None, None, None
    use_bf16_products(torch.nn.Sequential(layer))
    assert type(layer) is Bf16Linear
    near = layer(x)
    near.sum().backward()
    torch.testing.assert_close(near, exact, atol=0.03, rtol=0.02)
    torch.testing.assert_close(x.grad, grad, atol=0.03, rtol=0.02)
    torch.testing.assert_close(layer.weight.grad, weight_grad, atol=0.2, rtol=0.02)
    with torch.no_grad():
        assert torch.equal(layer(x), exact)


def test_bf16_attention_has_the_right_gradient():
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 9, 16) for _ in range(3)]
    mask = torch.full((9, 9), float("-inf")).triu(1)
    results = []
    for function in (
        lambda q, k, v: attend(q, k, v, mask),
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    ):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = function(q, k, v)
        (out**2).sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for near, exact in zip(*results, strict=True):
        torch.testing.assert_close(near, exact, atol=0.1, rtol=0.05)


def test_processor_matches_the_training_input(scenes):
    scene = scenes.scene("val", 0, 2)
    processor = build_processor()
    text = processor.apply_chat_template(chat("read all digits ."), add_generation_prompt=True)
    assert text == "USER: <image> read all digits . ASSISTANT:"
    inputs = processor(images=[scene.to_pil()], text=[text], return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    assert ids.count(IMAGE) == 144
    assert ids == [*PREFIX, *[IMAGE] * 144, *encode("read all digits ."), ASSISTANT]
    assert ids[0] == BOS
    torch.testing.assert_close(inputs["pixel_values"], normalise(scene.image[None]))


def test_processor_pads_on_the_left(scenes):
    image = scenes.scene("val", 0, 2).to_pil()
    texts = [f"USER: <image> {q} ASSISTANT:" for q in ("read all digits .", "what shape is red ?")]
    inputs = build_processor()(images=[image] * 2, text=texts, return_tensors="pt", padding=True)
    assert (inputs["input_ids"][:, -1] == ASSISTANT).all()


def test_saved_model_loads_completely_and_equal(tmp_path: Path, random_model):
    digest = save_model(build_from(random_model), tmp_path)
    loaded = load_exported(tmp_path)
    assert digest == file_sha256(tmp_path / "model.safetensors")
    for key, value in random_model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value.half().float())


def build_from(model):
    copy = build_model("seedling_draft")
    copy.load_state_dict(model.state_dict())
    return copy


def test_incomplete_weights_are_refused(tmp_path: Path, random_model):
    from safetensors.torch import load_file, save_file

    save_model(build_from(random_model), tmp_path)
    path = tmp_path / "model.safetensors"
    weights = {k: v for k, v in load_file(path).items() if "mlp.fc1" not in k}
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="do not fit"):
        load_exported(tmp_path)


def test_draft_starts_from_chosen_layers():
    target = build_model("seedling")
    draft = draft_from_target(target, [1, 4])
    source, copied = target.state_dict(), draft.state_dict()
    name = "model.language_model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(copied[name.format(1)], source[name.format(4)])
    tower = next(key for key in copied if "class_embedding" in key)
    assert torch.equal(copied[tower], source[tower])


def test_random_subset_keeps_tokens_with_their_positions():
    visual = torch.arange(2 * 144, dtype=torch.float32).view(2, 144, 1)
    inside = np.zeros((2, 144), bool)
    kept, positions = random_subset(visual, inside, 20, 0.0, np.random.default_rng(0))
    assert kept.shape == (2, 20, 1)
    assert (positions.diff(dim=1) > 0).all()
    chosen = positions - len(PREFIX)
    assert torch.equal(kept[..., 0], torch.gather(visual[..., 0], 1, chosen))


def test_workers_share_a_batch_without_overlap():
    shares = [Worker(rank, 2).share(step=3, batch=8, first=100) for rank in range(2)]
    assert [*shares[0], *shares[1]] == list(range(124, 132))


def test_checkpoint_survives_a_broken_write(tmp_path: Path):
    path = tmp_path / "a.pt"
    assert load_checkpoint(path) is None
    save_checkpoint(path, {"step": 1})
    (tmp_path / "a.partial").write_bytes(b"half")
    assert load_checkpoint(path) == {"step": 1}


def test_keep_choosers_return_sorted_distinct_tokens():
    layout = make_layout("val", 0, range(4))
    overlap = patch_targets(layout).overlap
    for choose in (random_keep, objects_first_keep):
        kept = choose("val", range(4), 20)(layout)
        assert kept.shape == (4, 20)
        assert (np.diff(kept, axis=1) > 0).all()
    for row in range(4):
        per_patch = overlap[row]
        assert per_patch[kept[row]].sum() == np.sort(per_patch)[-20:].sum()


def test_missed_targets_names_what_is_low():
    scores = {"attr": (0.9, 9), "exist": (1.0, 9), "count": (1.0, 9), "rec": (0.5, 9)}
    assert missed_targets(scores, {"vqa": 0.95, "rec": 0.9}) == ["rec 0.500 < 0.9"]


def test_shipped_files_are_the_recorded_ones():
    recorded = dict(line.split()[::-1] for line in SUMS.read_text().splitlines())
    shipped = SUMS.parent.glob("*/model.safetensors")
    digests = {str(path.relative_to(SUMS.parent)): file_sha256(path) for path in shipped}
    assert digests == recorded
    assert all(f"{name}/model.safetensors" in digests for name in NAMES)
    assert all((SUMS.parent / name).stat().st_size < 8_000_000 for name in digests)


@pytest.fixture(scope="module")
def shipped():
    return load_exported(weights_dir("seedling"))


def test_shipped_processor_is_the_built_one():
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(weights_dir("seedling"))
    assert processor.tokenizer.get_vocab() == {word: i for i, word in enumerate(VOCABULARY)}
    assert processor.chat_template == build_processor().chat_template
    assert processor.tokenizer.padding_side == "left"


@pytest.mark.slow
def test_shipped_model_answers_validation_questions(shipped):
    questions = QuestionSet(shipped, "val", 32, {"attr": 1, "exist": 1, "count": 1, "rec": 1})
    scores = questions.scores(shipped)
    assert np.mean([scores[name][0] for name in ("attr", "exist", "count")]) >= 0.95
    assert scores["rec"][0] >= 0.9


def test_shipped_model_does_not_depend_on_the_share_of_background(shipped):
    """A quarter of the tokens, all on objects, answers about objects nearly as well as all."""
    questions = QuestionSet(shipped, "val", 24, {"attr": 1, "exist": 1, "rec": 1})
    scores = questions.scores(shipped, objects_first_keep("val", questions.index, 36))
    assert min(scores[name][0] for name in ("attr", "exist", "rec")) >= 0.8


def test_public_api_gives_the_same_answers(shipped, scenes):
    """``generate`` with the processor agrees with the loop the gate uses."""
    processor = build_processor()
    scene = scenes.scene("val", 0, 0)
    text = "USER: <image> describe the image . ASSISTANT:"
    inputs = processor(images=[scene.to_pil()], text=[text], return_tensors="pt")
    tokens = shipped.generate(**inputs, do_sample=False, max_new_tokens=80)
    tokens = tokens[0, inputs["input_ids"].shape[1] :]
    with torch.no_grad():
        features = patch_features(tower_of(shipped), inputs["pixel_values"])[:, 1:]
        visual = shipped.model.multi_modal_projector(features)
    positions = torch.arange(len(PREFIX), TEXT_START)[None]
    question = torch.tensor([[*encode("describe the image ."), ASSISTANT]])
    answer = greedy_answers(shipped, visual, positions, question, 80)[0]
    assert processor.decode(tokens, skip_special_tokens=True) == answer


@pytest.mark.slow
def test_teacher_forced_validation_equals_decoding(scenes):
    model = load_exported(weights_dir("seedling_draft"))
    mix = {"attr": 2, "exist": 2}
    decoded = QuestionSet(model, "val", 16, mix).scores(model)
    use_packed_attention(model.model.language_model)
    batch = make_batch(scenes, tower_of(model), "val", 0, range(16), {"mixes": [mix]}, ONES)
    forced = exact_answers(model, batch)
    for name, answers in forced.items():
        assert sum(answers) / len(answers) == pytest.approx(decoded[name][0])
    assert set(validate(model, tower_of(model), scenes, "val", 16)) >= set(forced)
