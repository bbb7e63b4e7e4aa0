"""The report in a browser: filters, sorting and tabs work, quickly, without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.reports.curves.plot_style import looks
from espalier.harness.reports.html.page_assembly import LIMIT, assemble
from tests.pages.test_report import content, root

__all__ = ["root"]

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium with chromedriver on this machine (apt-get install chromium chromium-driver)",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def opened(browser: Any, page: str, path: Path) -> None:
    path.write_text(page, encoding="utf-8")
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(path.as_uri())


def chosen(browser: Any, name: str, value: str) -> None:
    """Choose or type what a filter has, as a person's browser would tell the page."""
    browser.execute_script(
        "const one = document.getElementById(arguments[0]); one.value = arguments[1];"
        "one.dispatchEvent(new Event(one.tagName === 'SELECT' ? 'change' : 'input'));",
        name,
        value,
    )


def cells(browser: Any, column: int) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll('#board tbody tr')].map((row) => row.cells[arguments[0]].innerText)",
        column,
    )


def click(browser: Any, selector: str) -> None:
    browser.find_element("css selector", selector).click()


def test_filters_sorting_and_tabs(browser: Any, root: Path, tmp_path: Path) -> None:
    opened(browser, assemble(content(root)), tmp_path / "page.html")
    assert len(cells(browser, 0)) == 5
    # The best score stands first, and a second click turns the order round.
    assert cells(browser, 0)[-1] == "random"
    click(browser, "button[data-sort=value]")
    assert cells(browser, 0)[0] == "random"
    assert (
        browser.find_element("css selector", "th.value").get_attribute("aria-sort") == "ascending"
    )

    chosen(browser, "f-kind", "control")
    assert cells(browser, 0) == ["random", "random"]
    chosen(browser, "f-ratio", "0.9")
    assert browser.find_element("id", "count").text == "1 of 5 rows"
    click(browser, "#f-reset")
    assert browser.find_element("id", "count").text == "5 of 5 rows"

    curves = (
        "return [...document.querySelectorAll('#curves g.curve')].map((one) => one.dataset.curve)"
    )
    click(browser, "#tab-curves")
    assert browser.execute_script(curves) == ["clever", "random"]
    chosen(browser, "f-text", "clev")
    assert browser.execute_script(curves) == ["clever"]
    chosen(browser, "f-text", "no such method")
    assert browser.execute_script(curves) == []
    chosen(browser, "f-text", "")

    click(browser, "#tab-cost")
    assert browser.execute_script("return document.querySelectorAll('path.front').length") == 1
    browser.execute_script(
        "const one = document.getElementById('limit'); one.value = 20; one.dispatchEvent(new Event('input'))"
    )
    best = browser.execute_script("return document.querySelector('#atmost tbody').innerText")
    # At a fifth of the FLOPs only the points with a tenth of the tokens are left.
    assert "81.0" in best
    assert "90.0" not in best

    for part in ("methods", "tables", "pictures", "leftout", "board"):
        click(browser, f"#tab-{part}")
        seen = browser.execute_script(
            "return [...document.querySelectorAll('main > section')].filter((one) => !one.hidden).map((one) => one.id)"
        )
        assert seen == [part]
    assert [one for one in browser.get_log("browser") if one["level"] == "SEVERE"] == []
    messages = [json.loads(one["message"])["message"] for one in browser.get_log("performance")]
    asked = [
        one["params"]["request"]["url"]
        for one in messages
        if one["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("part", ["board", "curves", "cost", "methods"])
def test_nothing_runs_over_the_edge_of_a_telephone(
    browser: Any, root: Path, tmp_path: Path, part: str
) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False},
    )
    opened(browser, assemble(content(root)), tmp_path / "page.html")
    click(browser, f"#tab-{part}")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def many(few: dict[str, Any], benchmarks: int, methods: int, ratios: int) -> dict[str, Any]:
    """Return a page's content with a row for each benchmark, method and ratio, and their curves."""
    texts = {key: list(values) for key, values in few["rows"]["texts"].items()}
    texts |= {
        "benchmark": [f"benchmark {b}" for b in range(benchmarks)],
        "curve": [f"method {m}" for m in range(methods)],
        "kind": ["before the LLM"],
    }
    cells = [(b, m, r) for b in range(benchmarks) for m in range(methods) for r in range(ratios)]
    columns = {key: [0] * len(cells) for key in few["rows"]["columns"]}
    columns["benchmark"] = [b for b, _, _ in cells]
    columns["curve"] = [m for _, m, _ in cells]
    columns["ratio"] = [r / ratios for _, _, r in cells]
    columns["value"] = [((7 * b + 13 * m + r) % 97) / 97 for b, m, r in cells]
    columns["flops"] = [1 - r / ratios for _, _, r in cells]

    def points(b: int, m: int) -> list[dict[str, Any]]:
        found = []
        for r in range(ratios):
            value = ((7 * b + 13 * m + r) % 97) / 97
            ends = [value, value - 0.03, value + 0.03]
            found.append(
                {"ratio": r / ratios, "flops": 1 - r / ratios, "score": ends, "retention": ends}
            )
        return found

    curve = {"kind": "before the LLM", "floor": None}
    panels = [
        {**few["panels"][0], "model": texts["model"][0], "benchmark": f"benchmark {b}",
         "curves": [{**curve, "name": f"method {m}", "points": points(b, m)} for m in range(methods)]}
        for b in range(benchmarks)
    ]  # fmt: skip
    styles = looks((f"method {m}", False) for m in range(methods))
    return {**few, "rows": {"texts": texts, "columns": columns}, "panels": panels, "styles": styles}


def test_ten_thousand_rows_answer_at_once(browser: Any, root: Path, tmp_path: Path) -> None:
    page = assemble(many(content(root), 20, 50, 10))
    assert len(page) < LIMIT
    opened(browser, page, tmp_path / "page.html")
    assert browser.find_element("id", "count").text == "10000 of 10000 rows"
    # What a filter takes, the drawing of the page included; the best of three, as the machine may have other work.
    took = browser.execute_script(
        "const one = document.getElementById('f-text'); const times = [];"
        "for (const words of ['method 1', 'method 2', 'method 3']) { const start = performance.now();"
        "one.value = words; one.dispatchEvent(new Event('input')); document.body.offsetHeight;"
        "times.push(performance.now() - start); } return times"
    )
    # Words are found anywhere: a 3 in the method or in the benchmark.
    found = 10 * sum("3" in f"{b} {m}" for b in range(20) for m in range(50))
    assert browser.find_element("id", "count").text == f"{found} of 10000 rows"
    assert min(took) < 200
    click(browser, "#tab-curves")
    assert 0 < browser.execute_script("return document.querySelectorAll('g.curve').length") <= 48
