"""A picture of a run's curves for TensorBoard, drawn once, when the run is over."""

from __future__ import annotations

from pathlib import Path

from nestling.events import EventFile
from nestling.report.folder import read_run
from nestling.report.notebook import png_of


def picture(folder: Path) -> None:
    """Puts the accuracies of the run in a folder beside what TensorBoard reads there; nothing where
    none was measured, or matplotlib is not installed."""
    run = read_run(folder)
    png = png_of(run.metrics, run.name)
    if png is not None:
        events = EventFile(folder / "tensorboard")
        events.image("accuracy", png, step=int(run.metrics[-1]["round"]))
        events.close()
