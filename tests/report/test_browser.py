"""The pages in a real browser: drawn, quiet, readable on a phone, dark when asked, and complete
without JavaScript."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nestling
from nestling.cli.live import showing
from nestling.report.page import write_comparison, write_report
from tests.report.made_up_run import change, write_run
from tests.small import small

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = [
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver on the path"
    ),
]

UNDRAWN = """
const charts = [...document.querySelectorAll('svg.chart')];
const seen = (mark) => {
  const box = mark.getBBox();
  const drawn = box.width > 0 && (box.height > 0 || mark.getTotalLength() > 0);
  return drawn && mark.getBoundingClientRect().width > 0;
};
return [charts.length, charts.filter((chart) => {
  const marks = [...chart.querySelectorAll('.mark')];
  const lines = [...chart.querySelectorAll('path.line')];
  return !marks.length || !marks.every(seen) || !lines.every((line) => line.getTotalLength() > 0);
}).map((chart) => chart.querySelector('title').textContent)];
"""

SMALLEST_TEXT = """
return Math.min(...[...document.querySelectorAll('svg.chart')].map((chart) =>
  chart.getBoundingClientRect().width / chart.viewBox.baseVal.width
  * parseFloat(getComputedStyle(chart.querySelector('text')).fontSize)));
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    service = pytest.importorskip("selenium.webdriver.chrome.service")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for flag in [*FLAGS, f"user-data-dir={profile}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=service.Service(DRIVER))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write_run(folder / "a"),
        write_run(folder / "b", seed=1),
        write_run(folder / "c", method="fedavg", title="FedAvg", gain=-0.1),
    ]
    nestling.run(small(), out=folder / "real")
    return {
        "real": folder / "real" / "report.html",
        "run": write_report(runs[0]),
        "unfinished": write_report(write_run(folder / "half", done=1)),
        "comparison": write_comparison(runs, folder / "all.html"),
    }


@pytest.fixture(params=["real", "run", "unfinished", "comparison"])
def page(request: pytest.FixtureRequest, made: dict[str, Path], driver: Any) -> Any:
    """The browser with one of the pages open, on a desktop, in light colours."""
    return show(driver, made[request.param])


def show(driver: Any, page: Path | str, *, width: int = 1280, scheme: str = "light") -> Any:
    """A file or an address, in a window of this width and in these colours."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    emulate(driver, scheme)
    driver.get(page.as_uri() if isinstance(page, Path) else page)
    return driver


def emulate(driver: Any, scheme: str) -> None:
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )


def background(driver: Any) -> str:
    return driver.execute_script("return getComputedStyle(document.body).backgroundColor")


def state(driver: Any) -> str:
    """How the run stands, read in one step: a watched page may replace it at any time."""
    return driver.execute_script("return document.querySelector('.state').textContent")


def bring_into_view(driver: Any, element: Any) -> None:
    """Scroll, and wait for the frame in which the page is told of it."""
    driver.execute_async_script(
        "arguments[0].scrollIntoView({block: 'center'}); requestAnimationFrame(() => "
        "requestAnimationFrame(arguments[1]))",
        element,
    )


def hover(driver: Any, element: Any) -> None:
    from selenium.webdriver import ActionChains

    bring_into_view(driver, element)
    ActionChains(driver).move_to_element(element).move_by_offset(1, 1).perform()


def test_every_chart_is_drawn(page: Any) -> None:
    count, undrawn = page.execute_script(UNDRAWN)
    assert count >= 4
    assert undrawn == []


def test_nothing_is_fetched_and_nothing_goes_wrong(page: Any) -> None:
    assert (
        page.execute_script(
            "return performance.getEntriesByType('resource').map((entry) => entry.name)"
        )
        == []
    )
    assert page.get_log("browser") == []


@pytest.mark.parametrize("width", [320, 360, 768])
def test_no_page_scrolls_sideways(page: Any, width: int) -> None:
    show(page, Path(page.current_url.removeprefix("file://")), width=width)
    page.execute_script(
        "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
    )
    assert page.execute_script("return innerWidth") == width
    assert page.execute_script("return document.scrollingElement.scrollWidth") <= width + 1


def test_text_in_charts_is_readable_on_a_phone(driver: Any, made: dict[str, Path]) -> None:
    show(driver, made["run"], width=360)
    assert driver.execute_script(SMALLEST_TEXT) >= 9


def test_dark_follows_the_system(page: Any) -> None:
    light = background(page)
    emulate(page, "dark")
    assert background(page) != light


def test_the_button_switches_and_is_remembered(driver: Any, made: dict[str, Path]) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    show(driver, made["run"])
    light = background(driver)
    driver.find_element("id", "theme").click()
    dark = background(driver)
    assert dark != light
    driver.refresh()
    # The browser may answer before the page's script has run.
    WebDriverWait(driver, 10).until(lambda it: background(it) == dark)
    driver.find_element("id", "theme").click()
    emulate(driver, "dark")
    assert background(driver) == light
    driver.execute_script("localStorage.clear()")


def test_without_javascript_the_page_is_complete(driver: Any, made: dict[str, Path]) -> None:
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show(driver, made["run"])
        assert driver.find_elements("css selector", ".tip, .sheet, thead button") == []
        assert not driver.find_element("id", "theme").is_displayed()
        charts = driver.find_elements("css selector", "svg.chart")
        assert len(charts) >= 6
        for chart in charts:
            marks = chart.find_elements("css selector", ".mark")
            assert marks
            assert all(mark.rect["width"] > 0 for mark in marks[:8])
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_hovering_reads_out_the_values(driver: Any, made: dict[str, Path]) -> None:
    show(driver, made["run"])
    hover(driver, driver.find_element("css selector", "svg.lines"))
    tip = driver.find_element("css selector", ".tip").text
    assert tip.startswith("round ")
    assert all(label in tip for label in ("Global model", "STM32F446RE", "server"))
    assert tip.count("%") == 5
    hover(driver, driver.find_element("css selector", "svg.heat rect.cell"))
    assert driver.find_element("css selector", ".tip").text.startswith("client ")


def saved(driver: Any, section: str, word: str, folder: Path) -> str:
    return saved_file(driver, section, word, folder).read_text(encoding="utf-8")


def saved_file(driver: Any, section: str, word: str, folder: Path) -> Path:
    """What the first link `word` of a section saves."""
    from selenium.webdriver.support.wait import WebDriverWait

    folder.mkdir()
    driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)}
    )
    buttons = driver.find_elements("css selector", f"{section} .saves button")
    button = next(one for one in buttons if one.text == word)
    bring_into_view(driver, button)
    button.click()

    def done(_: Any) -> list[Path]:
        return [path for path in folder.iterdir() if path.suffix == f".{word.lower()}"]

    return Path(WebDriverWait(driver, 60).until(done)[0])


def test_every_chart_can_be_saved(page: Any) -> None:
    charts = page.find_elements("css selector", "svg.chart")
    assert len(page.find_elements("css selector", ".saves")) == len(charts) >= 4


def test_a_chart_is_saved_as_a_table_and_as_a_picture(
    driver: Any, made: dict[str, Path], tmp_path: Path
) -> None:
    show(driver, made["real"])
    rows = list(csv.reader(io.StringIO(saved(driver, "#coverage", "CSV", tmp_path / "a"))))
    assert rows[0] == ["layer", "by", "channel", "replies", "share"]
    assert {row[0] for row in rows[1:]} >= {"stages.0.conv", "head"}
    assert all(0 <= float(row[4]) <= 1 for row in rows[1:])
    lines = list(csv.reader(io.StringIO(saved(driver, "#scores", "CSV", tmp_path / "b"))))
    assert lines[0] == ["series", "round", "accuracy"]
    assert {row[1] for row in lines[1:]} == {"1", "2"}
    text = saved(driver, "#coverage", "SVG", tmp_path / "c")
    picture = ET.fromstring(text)
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert not any("class" in one.attrib or "data-table" in one.attrib for one in picture.iter())
    filled = [one.get("fill") for one in picture.iter() if one.tag.endswith("rect")]
    assert len(filled) > 4
    assert all(str(fill).startswith(("rgb", "#")) for fill in filled)


def test_a_chart_is_saved_as_pixels(driver: Any, made: dict[str, Path], tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    show(driver, made["real"], scheme="dark")
    box = driver.execute_script(
        "const box = document.querySelector('#scores svg.chart').viewBox.baseVal; "
        "return [box.width, box.height]"
    )
    with image.open(saved_file(driver, "#scores", "PNG", tmp_path / "a")) as picture:
        assert picture.size == tuple(round(2 * side) for side in box)
        back = driver.execute_script(
            "return getComputedStyle(document.documentElement).getPropertyValue('--card').trim()"
        )
        assert "#{:02x}{:02x}{:02x}".format(*picture.convert("RGB").getpixel((1, 1))) == back
        assert len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 10
    assert driver.get_log("browser") == []


def test_the_grid_reads_out_who_trained_what(driver: Any, made: dict[str, Path]) -> None:
    show(driver, made["real"])
    hover(driver, driver.find_element("css selector", "svg.history"))
    tip = driver.find_element("css selector", ".tip").text
    assert tip.startswith("client ")
    assert "of the model" in tip or "not chosen" in tip


def test_a_watched_page_shows_a_later_round_without_a_reload(driver: Any, tmp_path: Path) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    folder = write_run(tmp_path / "live", rounds=6, done=2)
    with showing(folder) as server:
        driver.get(server.url)
        driver.execute_script("window.same = true; document.querySelector('details').open = true")
        assert "2 of 6 rounds" in state(driver)
        before = driver.find_element("css selector", "#split")
        write_run(folder, rounds=6, done=3)
        WebDriverWait(driver, 60).until(lambda it: "3 of 6 rounds" in state(it))
        assert driver.execute_script("return window.same")
        assert (
            driver.execute_script("return performance.getEntriesByType('navigation').length") == 1
        )
        asked = driver.execute_script(
            "return performance.getEntriesByType('resource').map((entry) => entry.name)"
        )
        assert asked
        assert all(name.startswith(f"{server.url}parts?") for name in asked)
        assert before.is_displayed()  # what has not changed was not replaced
        assert driver.execute_script("return document.querySelector('#rounds details').open")
        hover(driver, driver.find_element("css selector", "svg.lines"))
        assert driver.find_element("css selector", ".tip").text.startswith("round ")
        assert len(driver.find_elements("css selector", ".saves")) == len(
            driver.find_elements("css selector", "svg.chart")
        )
        assert driver.get_log("browser") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_watched_page_is_readable_on_a_phone(driver: Any, tmp_path: Path, scheme: str) -> None:
    """Also after a round that came while it was open, which is drawn by the page's own script."""
    from selenium.webdriver.support.wait import WebDriverWait

    folder = write_run(tmp_path / "live", rounds=6, done=2)
    with showing(folder) as server:
        show(driver, server.url, width=390, scheme=scheme)
        back = background(driver)
        assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 3 * 128) == (scheme == "dark")
        assert driver.find_element("css selector", ".brand .live").is_displayed()
        for done in (2, 3):
            write_run(folder, rounds=6, done=done)
            WebDriverWait(driver, 60).until(lambda it, so=done: f"{so} of 6 rounds" in state(it))
            assert driver.execute_script("return document.scrollingElement.scrollWidth") <= 391
            assert driver.execute_script(SMALLEST_TEXT) >= 9
            count, undrawn = driver.execute_script(UNDRAWN)
            assert count >= 4 and undrawn == []
            assert background(driver) == back


def test_the_tables_of_a_comparison_fit_a_desktop(
    driver: Any, made: dict[str, Path], tmp_path: Path
) -> None:
    """Also those of eight tiers with long names, and with spreads."""
    runs = [write_run(tmp_path / f"heterofl-alpha0.1-seed{at}", seed=at) for at in range(3)]
    for run in runs:
        told = json.loads((run / "federation.json").read_text())["tiers"]
        names = [tier["name"] for tier in told]
        tiers = [
            {**tier, "name": name, "title": "Workstation with one GPU of 24 GB"}
            for tier in told
            for name in (tier["name"], f"{tier['name']}-2")
        ]
        change(run / "federation.json", tiers=tiers)
        by_tier = json.loads((run / "summary.json").read_text())["by_tier"]
        change(run / "summary.json", by_tier={**by_tier, **{f"{n}-2": by_tier[n] for n in names}})
    for page in (made["comparison"], write_comparison(runs, tmp_path / "all.html")):
        show(driver, page, width=1280)
        widths = driver.execute_script(
            "return [...document.querySelectorAll('.scroll')].map((one) => "
            "[one.getAttribute('aria-label'), one.scrollWidth, one.clientWidth])"
        )
        wanted = {"Results", "Global accuracy, last, by tier", "Runs"}
        assert {label for label, _, _ in widths} >= wanted
        assert [one for one in widths if one[1] > one[2]] == []


def test_a_thousand_rounds_of_a_hundred_clients_open_in_two_seconds(
    driver: Any, tmp_path: Path
) -> None:
    """The best of three, since a machine that has other things to do is no fault of the page."""
    from selenium.webdriver.support.wait import WebDriverWait

    folder = write_run(tmp_path, rounds=1000, clients=100)
    everybody = list(range(100))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for record in records:
        at = record["round"]
        record["clients"], record["missed"] = everybody, [7 * at % 100]
        record["trained"] = [1_000 - (client + at) % 3 * 50 for client in everybody]
        record["refusals"] = [{"client": client, "reason": "late"} for client in range(at % 20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    page = write_report(folder)
    times = []
    loaded = "return performance.getEntriesByType('navigation')[0].loadEventEnd"
    for _ in range(3):
        show(driver, page)
        times.append(WebDriverWait(driver, 60).until(lambda it: it.execute_script(loaded)))
        # what its script adds at the end is there
        assert len(driver.find_elements("css selector", ".saves")) >= 8
    assert min(times) < 2000, times


def test_a_click_on_a_heading_sorts(driver: Any, made: dict[str, Path]) -> None:
    show(driver, made["run"])
    table = driver.find_element("css selector", "#scores table")

    def column(number: int) -> list[str]:
        return [
            cell.text
            for cell in table.find_elements("css selector", f"tbody tr > :nth-child({number})")
        ]

    before = column(3)
    button = table.find_element("css selector", "thead tr:last-child th:nth-child(3) button")
    bring_into_view(driver, button)
    button.click()
    assert column(3) == sorted(before, reverse=True) != before
    button.click()
    assert column(3) == sorted(before)
    assert table.find_element("css selector", "tfoot th").text == "All"
