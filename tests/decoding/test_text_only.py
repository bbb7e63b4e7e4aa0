"""Samples without images and videos, alone and in a batch with others; and texts that mark the place of images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from espalier.harness.cost.budget import RULES, Budget
from espalier.harness.cost.facts import Work
from espalier.harness.cost.flops import flops_block, sample_flops
from espalier.harness.decoding.speculative.speculation import with_chats
from espalier.harness.engine.session import Session
from espalier.harness.models.chat_media import place_media
from espalier.methods.none import NoReduction
from tests.decoding.test_speculation import DECODERS, GREEDY, speculation, target
from tests.families import FAMILIES
from tests.family_runs import Tiny, answered, generation
from tests.methods.cases import CASES, build, case_id, signals_of
from tests.methods.runs import kept_by
from tests.methods.test_matrix import CALIBRATED, VIDEOS, adapter_of
from tests.tiny import Scatter, chat, picture

BLIND = chat("w1 w2 ?")

#: One of each family, the ways of feeding it aside.
NAMES = (
    "llava",
    "llava_next",
    "onevision_mixed",
    "qwen2_5_vl_mixed",
    "qwen3_vl_mixed",
    "internvl_video",
    "glm4v",
)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", [*NAMES, "llava_video", "deepseek_ocr_gundam", "deepseek_ocr2"])
def test_a_text_alone_is_answered_as_the_model_answers_it(name: str) -> None:
    tiny, seeing = Tiny(name), FAMILIES[name].chats[1]
    adapter = tiny.adapter
    text_inputs, pair = adapter.encode([BLIND]), adapter.encode([seeing, BLIND])
    assert "pixel_values" not in text_inputs
    ids, logits = answered(adapter, text_inputs)
    for where in (("vision",), ("prefix",), (2,)):
        method = Scatter(where, merge=where == ("vision",))
        for backend in ("drop", "emulate"):
            with Session(adapter, method, Budget("kept", 0.6), backend=backend) as session:
                single = session.generate(text_inputs, ["b"], **generation(adapter, text_inputs))
                batch = session.generate(pair, ["a", "b"], **generation(adapter, pair))
            assert torch.equal(single.ids, ids)
            assert torch.equal(batch.ids[1], ids[0])
            assert (batch.logits[1] - logits[0]).abs().max() < 1e-6
            for record in (single.records[0], batch.records[1]):
                assert (record.visual, record.special, record.kv_entries) == (0, 0, 0)
                assert record.kept == record.requested == (0,)
                assert set(record.entering) == {0}
                assert record.work == Work()
                assert record.text == text_inputs["input_ids"].shape[1]
            assert batch.records[0].kept < (batch.records[0].visual,)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_method_leaves_a_text_alone_beside_a_picture(
    case: tuple[str, dict[str, Any]],
) -> None:
    method = build(case)
    name = VIDEOS[0] if method.needs_frames() else "llava"
    adapter, seeing = adapter_of(name), FAMILIES[name].chats[0]
    changes: dict[str, Any] = CALIBRATED if "prior" in signals_of(method) else {}
    plain = kept_by(adapter, NoReduction(), [BLIND], 0.0)
    text_only = kept_by(adapter, method, [BLIND], 0.5, **changes)
    batch = kept_by(adapter, method, [seeing, BLIND], 0.5, "ab", **changes)
    picture_only = kept_by(adapter, method, [seeing], 0.5, "a", **changes)
    assert torch.equal(text_only.logits, plain.logits)
    assert (batch.logits[1] - plain.logits[0]).abs().max() < 1e-6
    assert (batch.logits[0] - picture_only.logits[0]).abs().max() < 1e-6
    for record in batch.records:
        Budget("kept", 0.5).verify(method, adapter.facts, record)


def test_a_text_alone_meets_every_budget_and_costs_its_text() -> None:
    adapter, method = adapter_of("llava"), Scatter((1, 3))
    facts = adapter.facts
    for rule in RULES:
        (record,) = kept_by(adapter, method, [BLIND], 0.6, rule=rule).records
        assert record.kept == (0, 0)
        achieved = Budget(rule, 0.6).verify(method, facts, record)
        assert getattr(achieved, rule) == pytest.approx(0, abs=1e-9)
    block = flops_block([sample_flops(facts, record.entering, 0, record.text, record.work)])
    assert (block["tower"], block["projector"], block["share_of_full"]) == (0, 0, 1)


@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_answers_a_text_alone(name: str) -> None:
    question = chat("where is the red circle ?")
    inputs = target().encode([question])
    plain = target().model.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :]
    overrides = [] if "ratio" in name else ["ratio=0.9"]
    with speculation(
        name, "engine.transport=sequential", "engine.patience=2", *overrides
    ) as decoder_session:
        generated = decoder_session.generate(
            target().to_device(with_chats(target(), [question])), ["text/0"], **GREEDY
        )
    (record,) = generated.records
    assert generated.ids[0].tolist() == plain.tolist()
    assert (record.visual, set(record.entering)) == (0, {0})
    assert record.decoding["degraded"] is None
    assert record.decoding["draft_visual"] == 0


# ---------------------------------------------------------------- marks in texts


def words(adapter: Any, question: list[dict]) -> str:
    """What the prompt of a chat says, as it goes to the processor."""
    return str(
        adapter.render(place_media(question, adapter.data.placeholders, adapter.data.inline))
    )


@pytest.mark.parametrize(
    ("name", "holder"),
    [
        ("llava", "<image>"),
        ("llava_next", "<image>"),
        ("onevision_image", "<image>"),
        ("internvl", "<IMG_CONTEXT>"),
        ("deepseek_ocr", "<image>"),
    ],
)
def test_marks_say_where_the_pictures_belong(name: str, holder: str) -> None:
    adapter = Tiny(name).adapter
    question = chat("Of <image> and <image> which ?", picture(0, 30, 28), picture(1, 28, 40))
    text = words(adapter, question)
    assert f"Of {holder} and {holder} which ?" in text
    assert text.count(holder) == 2
    plain = chat("Of and which ?", picture(0, 30, 28), picture(1, 28, 40))
    ours, theirs = adapter.encode([question]), adapter.encode([plain])
    # The same pictures in the same order, with other words between them.
    assert torch.equal(ours["pixel_values"], theirs["pixel_values"])
    assert adapter.layout(ours).counts == adapter.layout(theirs).counts


@pytest.mark.parametrize(
    "name", ["llava", "onevision_image", "internvl", "qwen2_vl", "deepseek_ocr"]
)
@pytest.mark.parametrize("text", ["<image> Of these <image> which <image> ?", "w1 <image>"])
def test_marks_that_do_not_fit_the_pictures_go(name: str, text: str) -> None:
    adapter = Tiny(name).adapter
    question = chat(text, picture(0, 30, 28), picture(1, 28, 40))
    plain = chat(text.replace("<image>", ""), picture(0, 30, 28), picture(1, 28, 40))
    assert words(adapter, question) == words(adapter, plain)
    assert torch.equal(
        adapter.encode([question])["input_ids"], adapter.encode([plain])["input_ids"]
    )


def test_qwen_never_reads_a_mark_and_no_text_can_forge_a_placeholder() -> None:
    qwen = Tiny("qwen2_vl").adapter
    question = chat("<image> w1 <|image_pad|><|video_pad|>", picture(0, 56, 42))
    assert words(qwen, question) == words(qwen, chat(" w1 ", picture(0, 56, 42)))
    onevision = Tiny("onevision_image").adapter
    question = chat("<video>w1", picture(0, 30, 28))
    assert words(onevision, question) == words(onevision, chat("w1", picture(0, 30, 28)))
    assert words(onevision, chat("a <image> b")) == words(onevision, chat("a  b"))


def test_a_chat_without_marks_stays_the_object_it_was() -> None:
    question = chat("w1 < image >", 0)
    assert place_media(question, ("<image>",), "<image>") is question


def test_a_text_alone_can_be_refused() -> None:
    from espalier.harness.errors import UserError

    adapter = Tiny("llava").adapter
    strict = type(adapter)(
        adapter.model, adapter.processor, replace(adapter.spec, media="required")
    )
    with pytest.raises(UserError, match=r"holds no image and no video \(model\.media=required"):
        strict.encode([BLIND])
