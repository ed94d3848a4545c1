"""Commands that list what there is, and what fits where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nestling.cli.completing import complete_device
from nestling.cli.shared import AsJson, print_table, show_rows
from nestling.errors import InputError
from nestling.version import __version__


def methods(as_json: AsJson = False) -> None:
    """List the methods."""
    from nestling.cli.listing import method_rows, method_table

    show_rows(method_rows, method_table, as_json)


def devices(as_json: AsJson = False) -> None:
    """List the device catalogue."""
    from nestling.cli.listing import device_rows, device_table

    show_rows(device_rows, device_table, as_json)


def models(as_json: AsJson = False) -> None:
    """List the networks."""
    from nestling.cli.listing import model_rows, model_table

    show_rows(model_rows, model_table, as_json)


def config(
    section: Annotated[
        str,
        typer.Argument(help="A section, method.NAME or model.NAME (default: all sections)."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the settings of an experiment: type, range or choices, default and meaning.

    One section, e.g. split; method.NAME for a method's own settings; model.NAME for a network's.
    """
    from nestling.cli.listing import setting_rows, setting_table
    from nestling.sections import section_of, sections

    found = [section_of(section)] if section else list(sections().values())
    if as_json:
        print(json.dumps([row for one in found for row in setting_rows(one)], indent=1))
        return
    for one in found:
        print_table(setting_table(one))


def fit(
    model: Annotated[
        str,
        typer.Argument(
            help="A network by name (see `nestling models`) or package.module:callable."
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(help="A device of the catalogue.", autocompletion=complete_device),
    ] = None,
    fleet: Annotated[Path | None, typer.Option(help="A fleet's TOML file.")] = None,
    shape: Annotated[str, typer.Option(help="The shape of one input, e.g. 3,32,32.")] = "1,28,28",
    classes: Annotated[int, typer.Option(help="How many classes.")] = 10,
    batch: Annotated[int, typer.Option(help="Samples a batch.")] = 20,
    samples: Annotated[int, typer.Option(help="Training samples on the device.")] = 500,
    epochs: Annotated[int, typer.Option(help="Epochs a round.")] = 2,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum or adam.")] = "momentum",
    seconds: Annotated[float, typer.Option(help="Time a round may take (0: no limit).")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """The largest piece of a network that trains on a device, with the numbers that prove it."""
    if (device is None) == (fleet is None):
        raise InputError("give either --device or --fleet", field="--device")
    from nestling.cli.listing import fit_rows, fit_table
    from nestling.devices import Budget
    from nestling.views.cutting import Cutting

    budget = Budget(
        batch=batch, samples=samples, epochs=epochs, optimizer=optimizer, seconds=seconds
    )
    rows = fit_rows(model, _shape(shape), classes, budget, device, fleet)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(fit_table(model, rows))
        for line in Cutting(**rows[0]["cut"]).lines():
            print(f"  {line}")
        if device is not None:
            for reason in rows[0]["reasons"]:
                print(f"  {reason}")


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise InputError(
            f"cannot read the shape {text!r}",
            field="--shape",
            fix="write sizes with commas, e.g. 3,32,32",
        )
    return shape


def version() -> None:
    """Print the version."""
    print(__version__)
