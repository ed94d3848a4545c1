"""A picture of a run's curves for TensorBoard, drawn once, when the run is over."""

from __future__ import annotations

import logging
from pathlib import Path

from nestling.events import EventFile
from nestling.report.folder import read_run, summarise
from nestling.report.notebook import png_of
from nestling.runfiles import score_word

log = logging.getLogger("nestling")


def picture(folder: Path) -> None:
    """Puts the scores of the run in a folder beside what TensorBoard reads there; nothing where
    none was measured, or matplotlib is not installed. The run is over and stands: a picture that
    cannot be drawn is said, and takes nothing from it."""
    run = read_run(folder)
    try:
        png = png_of(run.metrics, run.name, score_word(summarise(run)))
    except Exception as error:  # whatever is wrong with matplotlib here
        log.warning("%s has no picture of its curves: %s: %s", folder, type(error).__name__, error)
        return
    if png is not None:
        events = EventFile(folder / "tensorboard")
        events.image("scores", png, step=int(run.metrics[-1]["round"]))
        events.close()
