"""The page of `espalier explore` in a browser: what a person clicks, and what the page then shows."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import espalier
from tests.interface.test_explore import answer, model, scene
from tests.pages.test_report_browser import browser, pytestmark

__all__ = ["browser", "model", "pytestmark", "scene"]

pytest.importorskip("gradio", reason="gradio is not installed (make test-explore)")


@pytest.fixture(scope="module")
def page(browser: Any, model: espalier.Model, scene: tuple[str, str]) -> Iterator[Any]:
    """Serve a page of the scene, and open it."""
    blocks = espalier.explore(model, scene[0], method="divprune", ratio=0.75)
    _, address, _ = blocks.launch(prevent_thread_lock=True)
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(address)
    yield browser
    blocks.close()


def until(browser: Any, words: str, *arguments: Any) -> Any:
    """Return the value of an expression of JavaScript as soon as it is one."""
    script = f"""
        const done = arguments[arguments.length - 1], start = Date.now();
        const look = () => {{
            const value = (() => {{ return {words}; }})();
            value || Date.now() - start > 25000 ? done(value) : setTimeout(look, 50);
        }};
        look();"""
    browser.set_script_timeout(30)
    value = browser.execute_async_script(script, *arguments)
    assert value, words
    return value


def typed(browser: Any, selector: str, words: str) -> None:
    """Put words in the place of those of a field."""
    until(browser, "document.querySelector(arguments[0])", selector)
    field = browser.find_element("css selector", selector)
    field.send_keys("\ue009a\ue000", words, "\ue004")


def halves(browser: Any) -> list[str]:
    """Press Ask, and return the HTML of both halves once they are others than before."""
    seen = "[...document.querySelectorAll('div.answers.prose')].map((half) => half.innerHTML)"
    browser.execute_script(f"window.before = JSON.stringify({seen})")
    until(browser, "[...document.querySelectorAll('button')].find((b) => b.innerText === 'Ask')")
    browser.execute_script(
        "[...document.querySelectorAll('button')].find((b) => b.innerText === 'Ask').click()"
    )
    return until(browser, f"JSON.stringify({seen}) !== window.before && {seen}")


def cell(browser: Any, name: str) -> list[list[str]]:
    """Return the cells of a row of each table."""
    rows = browser.execute_script(
        "return [...document.querySelectorAll('div.answers.prose tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    return [values for key, *values in rows if key == name]


def drawn(browser: Any) -> list[bytes]:
    sources = browser.execute_script(
        "return [...document.querySelectorAll('div.answers.prose img')].map((image) => image.src)"
    )
    return [b64decode(source.partition(",")[2]) for source in sources]


def test_ask_shows_both_methods_beside_the_unpruned_model(
    page: Any, model: espalier.Model, scene: tuple[str, str]
) -> None:
    typed(page, "textarea", scene[1])
    assert len(halves(page)) == 2
    unpruned = answer(model, "none", 0, scene)
    alone = [answer(model, method, 0.75, scene) for method in ("divprune", "random")]
    assert cell(page, "answer") == [[one.text, unpruned.text] for one in alone]
    assert cell(page, "visual tokens kept") == [["36 of 144", "144 of 144"]] * 2
    assert drawn(page) == [one.show()._repr_png_() for one in alone]


def test_the_slider_sets_what_is_kept(page: Any, scene: tuple[str, str]) -> None:
    typed(page, "textarea", scene[1])
    typed(page, "input[type=number]", "50")
    halves(page)
    assert cell(page, "visual tokens kept") == [["72 of 144", "144 of 144"]] * 2
    typed(page, "input[type=number]", "25")


def test_a_method_is_chosen_from_the_list_and_one_that_refuses_has_a_line(
    page: Any, scene: tuple[str, str]
) -> None:
    typed(page, "textarea", scene[1])
    first = page.find_element("css selector", "input[aria-label='Method A']")
    first.click()
    until(page, "document.querySelector('[role=option]')")
    options = page.find_elements("css selector", "[role=option]")
    by_name = {option.get_attribute("aria-label"): option for option in options}
    assert "fastv" in by_name
    assert "d3tom" not in by_name
    by_name["tome"].click()
    typed(page, "input[type=number]", "5")
    line, half = halves(page)
    assert "TOME" in line.upper()
    assert "cannot be met under budget=kept" in line
    assert "<img" in half
    assert cell(page, "visual tokens kept") == [["7 of 144", "144 of 144"]]


def test_an_empty_question_is_a_line(page: Any) -> None:
    typed(page, "textarea", " ")
    assert all("nothing to ask; valid: a picture and a question" in half for half in halves(page))


@pytest.mark.parametrize("length", [10, 2000])
def test_a_broken_file_is_a_line(
    page: Any, scene: tuple[str, str], tmp_path: Path, length: int
) -> None:
    typed(page, "textarea", scene[1])
    page.execute_script("document.querySelector('.picture button[aria-label^=Remove]').click()")
    until(page, "!document.querySelector('.picture .image-frame')")
    torn = tmp_path / f"torn{length}.png"
    torn.write_bytes(Path(scene[0]).read_bytes()[:length])
    page.find_element("css selector", ".picture input[type=file]").send_keys(str(torn))
    until(page, "document.querySelector('.picture .image-frame')")
    assert all(f"{torn.name}' cannot be read as an image" in half for half in halves(page))


def test_the_page_calls_nobody_and_fits_a_telephone(page: Any, scene: tuple[str, str]) -> None:
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    assert any(url.startswith("http://127.0.0.1") for url in urls)
    assert [url for url in urls if not url.startswith(("http://127.0.0.1", "data:", "blob:"))] == []
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False},
    )
    assert page.execute_script("return document.documentElement.scrollWidth") <= 400
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
