"""Makes docs/pictures: pages of runs as a browser shows them, light, dark, and on a phone.

python docs/make_pictures.py [RUNS]

Runs that the folder RUNS has (default, fedavg, heterofl, fedrolex, flexfl, live) are taken as they are, the others are played into it
first, which takes some minutes; without RUNS all are played, into a folder that is thrown away. chromium and chromedriver have to be on the path.
"""

from __future__ import annotations

import base64
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

import nestling
from nestling.cli.live import showing
from nestling.report.page import write_comparison, write_report

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "pictures"
WIDE, PHONE = 1140, 390
MARGIN = 12
MOST = 100_000
"""Bytes that a picture may have: who clones the repository carries it."""
STOPPED = 8
"""After which of its twelve rounds the run of the live view is shown."""
COVERED = ("fedavg", "heterofl", "fedrolex", "flexfl")
"""The methods whose channels are shown side by side."""
EXACT = 160
"""How many of a picture's 256 colours are its commonest ones."""
FLAGS = (
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "no-first-run",
    "hide-scrollbars",
    "disable-background-networking",
)


def main(runs: Path) -> None:
    """Plays what is missing in `runs`, and makes every picture."""
    PICTURES.mkdir(exist_ok=True)
    default = write_report(played(runs / "default", nestling.Experiment())).as_uri()
    four = [played(runs / name, coverage(name)) for name in COVERED]
    comparison = write_comparison(four, runs / "four.html").as_uri()
    live = played(runs / "live", coverage("heterofl"), until=STOPPED)
    charts = "#scores .pair"
    with browser() as driver, showing(live) as server:
        for scheme, end in (("light", ""), ("dark", "-dark")):
            page(driver, default, WIDE, scheme)
            picture(driver, f"page{end}", "body", f"{charts} > :nth-child(2)")
            page(driver, comparison, WIDE, scheme)
            picture(driver, f"coverage{end}", "#coverage", "#coverage")
            page(driver, server.url, WIDE, scheme)
            picture(driver, f"live{end}", "body", f"{charts} > :nth-child(2)")
        page(driver, default, PHONE, "light")
        picture(driver, "page-phone", "body", f"{charts} > :nth-child(1)")
        page(driver, comparison, PHONE, "dark")
        picture(driver, "coverage-phone", "#coverage", "#coverage .pair > :nth-child(2)")
        page(driver, server.url, PHONE, "light")
        picture(driver, "live-phone", "body", f"{charts} > :nth-child(1)")


def coverage(method: str) -> nestling.Experiment:
    """The experiment of examples/coverage.toml with this method."""
    return nestling.Experiment.read(
        DOCS.parent / "examples" / "coverage.toml", (f"method.name={method}",)
    )


def played(folder: Path, experiment: nestling.Experiment, until: int = 0) -> Path:
    """The run in a folder, played there if it is not there yet; with `until`, as far as that round."""
    if not folder.exists():
        done: list[int] = []
        watcher = nestling.Watcher(
            round=lambda row: done.append(row["round"]), stop=lambda: 0 < until <= len(done)
        )
        nestling.run(experiment, out=folder, watcher=watcher)
    return folder


@contextmanager
def browser() -> Iterator[Any]:
    """A browser without a window."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def page(driver: Any, url: str, width: int, scheme: str) -> None:
    """Opens a page in a window of this width, in light or dark colours."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wanted = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
    driver.get(url)


def picture(driver: Any, name: str, first: str, last: str) -> None:
    """Writes what the page shows from the top of the `first` element to the bottom of the `last`, as wide as the window."""
    box = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return [box.top + scrollY, box.bottom + scrollY]"
    top = max(0, driver.execute_script(box, first)[0] - MARGIN)
    height = driver.execute_script(box, last)[1] + MARGIN - top
    clip = {
        "x": 0,
        "y": top,
        "width": driver.execute_script("return innerWidth"),
        "height": height,
        "scale": 1,
    }
    taken = driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True}
    )
    file = PICTURES / f"{name}.png"
    shown = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
    shown.quantize(palette=palette(shown), dither=Image.Dither.NONE).save(file, optimize=True)
    if file.stat().st_size > MOST:
        raise SystemExit(f"{file} has {file.stat().st_size} bytes")


def palette(shown: Image.Image) -> Image.Image:
    """256 colours: the commonest as they are, so that no thin line is lost, and some that cover the rest."""
    exact = sorted(shown.getcolors(shown.width * shown.height), reverse=True)[:EXACT]
    rest = shown.quantize(256 - EXACT, method=Image.Quantize.MAXCOVERAGE).getpalette()[
        : 3 * (256 - EXACT)
    ]
    made = Image.new("P", (1, 1))
    made.putpalette([value for _, colour in exact for value in colour] + rest)
    return made


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
