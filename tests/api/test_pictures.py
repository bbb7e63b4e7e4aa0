"""Pictures and videos in Python: random draws depend on them, and unfit ones are refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import espalier
from espalier.harness.api.applied import sample_ids
from espalier.harness.api.questions import open_chat, opened_picture, question_chat, video
from tests.family_runs import saved
from tests.refused import refused
from tests.tiny import picture


@pytest.fixture(scope="module")
def model() -> Any:
    return espalier.load(saved("qwen2_vl"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def video_model() -> Any:
    return espalier.load(saved("qwen2_vl_video"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    return [picture(number, 112, 112) for number in range(6)]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a server on this machine with a picture and a text."""
    picture(0, 56, 42).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("no picture")
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_picture_may_lie_at_an_address(address: str, model: Any) -> None:
    opened = opened_picture(f"{address}/a.png", "drop")
    assert opened.tobytes() == picture(0, 56, 42).convert("RGB").tobytes()
    part = {"type": "image", "url": f"{address}/a.png"}
    (chat,) = open_chat([{"role": "user", "content": [part]}], model.spec)
    assert chat["content"][0]["image"].tobytes() == opened.tobytes()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("b.png", "cannot be fetched (HTTP Error 404: File not found); valid: an address"),
        ("a.txt", "cannot be read as an image"),
    ],
)
def test_an_address_without_a_picture_is_one_line(address: str, path: str, words: str) -> None:
    assert words in refused(opened_picture, f"{address}/{path}", "drop")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.full((4, 4, 3), -0.5), "values from -0.5 to 0"),
        (np.full((4, 4, 3), np.nan), "values from nan to nan"),
        (torch.full((3, 4, 4), 2.5), "values from 0 to 2.5"),
        (torch.zeros(5, 5, 2), "image of shape (5, 5, 2) and float32"),
        (torch.zeros(2, 3, 4, 4, 5), "image of shape (2, 3, 4, 4, 5)"),
        (np.zeros((4, 4), bool), "and bool"),
    ],
)
def test_arrays_of_another_shape_or_range_are_one_line(value: Any, words: str) -> None:
    line = refused(opened_picture, value, "drop")
    assert words in line
    assert "[0, 1]" in line


def test_words_that_a_model_does_not_know_are_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with espalier.apply(espalier.load("seedling", device="cpu"), "none") as plain:
        for _ in range(2):
            plain.ask(picture(0, 96, 96), "what is the purpose of red ?", max_new_tokens=1)
        plain.ask(picture(0, 96, 96), "what shape is red ?", max_new_tokens=1)
    assert [line for line in capsys.readouterr().err.splitlines() if "no token" in line] == [
        "model='seedling' has no token for 'purpose': they are read as unknown, and the answer may mean nothing"
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("method", ["random", "random_layer2"])
def test_random_choices_differ_by_picture_and_repeat(
    method: str, model: Any, pictures: list[Image.Image]
) -> None:
    question = "w1 w2"
    with espalier.apply(model, method, ratio=0.5) as pruned:
        single = [pruned.ask(image, question, max_new_tokens=2) for image in pictures]
        repeated = [pruned.ask(np.asarray(image), question, max_new_tokens=2) for image in pictures]
        many = pruned.ask_many([(image, question) for image in pictures], max_new_tokens=2)
        changed = pruned.ask(pictures[0], "w2 w1", max_new_tokens=2)

    def choices(answers: list[Any]) -> list[Any]:
        return [answer.kept_indices for answer in answers]

    assert len(set(choices(single))) == len(pictures)
    assert choices(repeated) == choices(many) == choices(single)
    assert choices([changed]) != choices(single[:1])


@pytest.mark.slow
def test_sampled_answers_differ_by_picture_and_repeat(
    model: Any, pictures: list[Image.Image]
) -> None:
    drawn = {"do_sample": True, "temperature": 50.0, "max_new_tokens": 8}
    with espalier.apply(model, "none") as plain:
        answers = [plain.ask(image, "w1", **drawn).text for image in pictures]
        assert answers == [plain.ask(image, "w1", **drawn).text for image in pictures]
    assert len(set(answers)) == len(pictures)


def test_a_sample_is_all_that_the_model_is_given(model: Any, pictures: list[Image.Image]) -> None:
    first, second = pictures[:2]
    frames = [np.asarray(image) for image in pictures[:4]]
    film = video(frames)
    chats = [
        question_chat(first, "w1", model.spec),
        question_chat([first, second], "w1", model.spec),
        question_chat([second, first], "w1", model.spec),
        question_chat(None, "w1", model.spec),
        question_chat(film, "w1", model.spec),
        question_chat(video(frames[::-1]), "w1", model.spec),
        question_chat(video(frames, fps=2), "w1", model.spec),
        question_chat(first.resize((56, 224)), "w1", model.spec),
        open_chat(
            [
                {"role": "user", "content": [{"type": "image", "image": second}]},
                {"role": "assistant", "content": "w2"},
                {"role": "user", "content": "w1"},
            ],
            model.spec,
        ),
    ]
    names = sample_ids(chats)
    assert len(set(names)) == len(chats)
    assert names == [*sample_ids(chats[:4]), *sample_ids(chats[4:])]
    assert sample_ids([question_chat(first.copy(), "w1", model.spec)]) == names[:1]


@pytest.mark.parametrize("size", [(1, 300), (300, 1), (2, 20000)])
def test_a_thin_picture_is_one_line_with_its_size_and_the_limit(
    size: tuple[int, int], model: Any, video_model: Any
) -> None:
    thin, fit = Image.new("RGB", size), Image.new("RGB", (56, 56))
    frames = [np.asarray(thin)] * 4
    width, height = size
    with espalier.apply(model, "none") as plain:
        cases: list[tuple[str, Any]] = [
            (rf"^picture 0 \({width}x{height}\)", lambda: plain.ask(thin, "w1")),
            (rf"^picture 1 \({width}x{height}\)", lambda: plain.ask([fit, thin], "w1")),
            (
                rf"^question 1: picture 0 \({width}x{height}\)",
                lambda: plain.ask_many([(fit, "w1"), (thin, "w1")]),
            ),
        ]
        for words, ask in cases:
            with pytest.raises(espalier.UserError, match=words + ".*smaller than 200"):
                ask()
        assert plain.ask(Image.new("RGB", (31, 639)), "w1", max_new_tokens=1).tokens == 1
    with (
        espalier.apply(video_model, "none") as plain,
        pytest.raises(espalier.UserError, match=rf"^video 0 \(frames of {width}x{height}\).*200"),
    ):
        plain.ask(video(frames), "w1")


def test_frames_of_one_or_three_rows_are_not_taken_for_channels(video_model: Any) -> None:
    """A video of flat frames is answered as one of taller frames that look the same."""
    for height in (1, 3):
        row = np.random.default_rng(0).integers(0, 256, (4, 1, 56, 3), dtype=np.uint8)
        film = video(np.repeat(row, height, axis=1))
        np.testing.assert_array_equal(film.pixels.transpose(0, 2, 3, 1), film.frames)
        with espalier.apply(video_model, "none") as plain:
            assert plain.ask(film, "w1", max_new_tokens=1).visual > 0


def test_transparency_is_a_setting_of_the_model(model: Any) -> None:
    clear = Image.new("RGBA", (56, 56), (0, 0, 0, 0))
    white = espalier.load(saved("qwen2_vl"), dtype="float32", device="cpu", transparency="white")
    for spec, shade in ((model.spec, 0), (white.spec, 255)):
        chats = [
            question_chat(clear, "w1", spec),
            question_chat(np.asarray(clear), "w1", spec),
            open_chat([{"role": "user", "content": [{"type": "image", "image": clear}]}], spec),
        ]
        for chat in chats:
            assert chat[0]["content"][0]["image"].getpixel((0, 0)) == (shade,) * 3
        (part, _) = question_chat([clear], "w1", spec)[0]["content"]
        assert part["image"].mode == "RGB"
    assert video([clear]).frames.max() == 0
    assert video([clear], transparency="white").frames.min() == 255
    with pytest.raises(espalier.UserError, match=r"^transparency='black' is unknown.*drop, white"):
        espalier.load("seedling", transparency="black")


def test_what_is_no_video_and_no_content_is_refused(model: Any) -> None:
    for source in (5, "film", None, {}):
        assert "is not a list of pictures" in refused(video, source)
    for fps in ("x", 0, float("inf")):
        with pytest.raises(espalier.UserError, match=r"fps=.* must be a number above 0"):
            video([np.zeros((4, 4, 3), np.uint8)], fps)
    for content in (5, None):
        assert "turn 0 of the chat is" in refused(
            open_chat, [{"role": "user", "content": content}], model.spec
        )
