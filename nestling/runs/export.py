"""The export of a run's model for one kind of its devices: the files, and a report of what was lost
and what it takes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from nestling.devices.units import show_bytes
from nestling.errors import InputError, unknown
from nestling.export import c_source, onnx_file, reference, tflite
from nestling.export.fold import FoldedNetwork, fold
from nestling.export.manifest import MANIFEST, SIGNATURE, manifest_of
from nestling.export.quantise import Quantised, quantise
from nestling.export.sizes import Sizes, require_room, sizes
from nestling.files import write_atomic, writing
from nestling.keys import private_key
from nestling.methods import Method
from nestling.models.record import words_of
from nestling.runs.evaluation import Bench, ready
from nestling.runs.run import Result, need_models, one_thread, opened
from nestling.seeds import stream
from nestling.version import __version__
from nestling.world import Plan, World

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMATS = ("c", "tflite", "onnx")
REPORT = "export.json"
CALIBRATION = 500
MOST_CLIENTS = 100
"""The calibration rows come from at most this many clients."""


@dataclass(frozen=True)
class ExportOptions:
    """What is asked of an export; refused where nobody could do it.

    formats:     which of `FORMATS` to write.
    calibration: how many rows the ranges of the eight bits are taken from.
    name:        of the files and of the function in C.
    sign:        the private key to sign the manifest with.
    """

    formats: tuple[str, ...] = FORMATS
    calibration: int = CALIBRATION
    name: str = "model"
    sign: str | Path | None = None

    def __post_init__(self) -> None:
        """Refuses a key that cannot be read, unknown formats and less than a row."""
        _ = self.key
        for word in self.formats:
            if word not in FORMATS:
                raise unknown("format", word, FORMATS, field="--format")
        if self.calibration < 1:
            raise InputError(
                f"{self.calibration} rows to calibrate with",
                field="--calibration",
                fix="give at least 1",
            )

    @cached_property
    def key(self) -> Ed25519PrivateKey | None:
        """What is in `sign`."""
        return private_key(Path(self.sign)) if self.sign is not None else None


@dataclass(frozen=True, eq=False)
class ClientModel:
    """Whose model is exported, by which method as of which round, and the rows that are there:
    `bench` holds those to calibrate with and those to test on, which `tested_on` names."""

    method: Method
    world: World
    bench: Bench
    client: int
    round: int
    tested_on: str = "test rows"

    @property
    def plan(self) -> Plan:
        """The plan of the client's tier."""
        return self.world.plans[self.world.fleet.tier_of(self.client).name]


@dataclass(frozen=True, eq=False)
class _Work:
    """A model on its way out."""

    whose: ClientModel
    module: nn.Module
    network: FoldedNetwork
    quantised: Quantised
    rows: int  # that it was calibrated with
    sizes: Sizes


def export(
    run: Result | str | Path,
    *,
    device: str,
    out: str | Path | None = None,
    formats: tuple[str, ...] = FORMATS,
    calibration: int = CALIBRATION,
    name: str = "model",
    trust: Iterable[str] = (),
    sign: str | Path | None = None,
) -> dict[str, Any]:
    """Writes the model that a run made for `device` (the name of a tier or of its device) and gives
    back the report.

    The model is quantised with `calibration` rows that clients trained on, of a personal model with
    rows of its client. What does not fit the device is refused. `trust` names the code that a run
    folder may have imported, as for `resume`. Beside the files lies a manifest of their digests,
    signed where `sign` names a private key.
    """
    options = ExportOptions(formats, calibration, name, sign)
    with _result(run, trust) as result:
        need_models(result)
        federation = result.federation
        tier = find_tier(federation.world, device).tier.name
        whose = ClientModel(
            federation.shown,
            federation.world,
            federation.bench,
            federation.world.fleet.member(tier, 0),
            federation.totals.round,
        )
        return ship(whose, _folder(result, tier, out), options)


def _result(run: Result | str | Path, trust: Iterable[str]) -> AbstractContextManager[Result]:
    return nullcontext(run) if isinstance(run, Result) else opened(run, trust)


def _folder(result: Result, tier: str, out: str | Path | None) -> Path:
    if out is not None:
        return Path(out)
    if result.folder is None:
        raise InputError(
            "the run has no folder to write to", field="--out", fix="say where to write"
        )
    return result.folder / f"export-{tier}"


def ship(whose: ClientModel, folder: Path, options: ExportOptions) -> dict[str, Any]:
    """Writes a client's model to a folder: the files, the report, the manifest and its
    signature."""
    with one_thread():  # the same files on a machine of any number of cores
        work = _prepare(whose, options.calibration)
    files = _files(work, options.formats, options.name)
    report = _report(work, files, folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        written = {**files, REPORT: json.dumps(report, indent=1)}
        raw = {n: data.encode() if isinstance(data, str) else data for n, data in written.items()}
        manifest = manifest_of(raw)
        # An old signature would be that of other files.
        (folder / SIGNATURE).unlink(missing_ok=True)
        for file, data in {**raw, MANIFEST: manifest}.items():
            write_atomic(folder / file, data)
        if options.key is not None:
            write_atomic(folder / SIGNATURE, options.key.sign(manifest))
    return report


def _prepare(whose: ClientModel, calibration: int) -> _Work:
    world, bench, plan = whose.world, whose.bench, whose.plan
    model = whose.method.model_for(world.device(whose.client))
    if model is None:
        raise InputError(
            f"{whose.method.as_set.title} has no model for {plan.tier.name}", field="--device"
        )
    module = copy.deepcopy(ready(model, bench)).cpu().eval()
    if words_of(module):
        raise InputError(
            "the network begins with an embedding of token ids, which no format here has",
            field="model.name",
            fix="take global.safetensors, or nestling.load(RUN).model",
        )
    network = fold(module, world.main.shape)
    clients = [whose.client] if whose.method.as_set.personal else None
    rows = calibration_rows(world, bench, calibration, clients)
    quantised = quantise(network, rows)
    needed = sizes(quantised, plan.profile)
    require_room(needed, plan.profile)
    return _Work(whose, module, network, quantised, len(rows), needed)


def find_tier(world: World, device: str) -> Plan:
    """The plan of the tier called `device`, or of the one tier that has such devices or boards."""
    if device in world.plans:
        return world.plans[device]
    found = [
        plan
        for plan in world.plans.values()
        if device and device in (plan.tier.device, plan.tier.board)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(plan.tier.name for plan in found)
        raise InputError(
            f"several tiers have the device {device!r}",
            field="--device",
            fix=f"name one of them: {names}",
        )
    devices = (plan.tier.device for plan in world.plans.values())
    raise unknown(
        "device of this run", device, {*world.plans, *filter(None, devices)}, field="--device"
    )


def calibration_rows(
    world: World, bench: Bench, count: int, clients: Sequence[int] | None = None
) -> Tensor:
    """That many rows that these clients trained on, or all there are; neither test rows nor rows
    that a client holds out. Without `clients` those of some of every tier."""
    if clients is None:
        fleet, share = world.fleet, max(1, MOST_CLIENTS // len(world.plans))
        clients = [
            fleet.member(tier, k)
            for tier in world.plans
            for k in range(min(share, fleet.count_of(tier)))
        ]
    rows = np.unique(np.concatenate([world.split.indices(client) for client in clients]))
    chosen = stream(world.seed, "export calibration").permutation(rows)[:count]
    return bench.x[torch.from_numpy(chosen).to(bench.x.device)].cpu()


def _files(work: _Work, formats: tuple[str, ...], name: str) -> dict[str, bytes | str]:
    files: dict[str, bytes | str] = {}
    if "c" in formats:
        files.update(c_source.write(work.quantised, name))
    if "tflite" in formats:
        files[f"{name}.tflite"] = tflite.write(work.quantised, name)
    if "onnx" in formats:
        files[f"{name}.onnx"] = onnx_file.write(work.network, work.whose.world.main.shape, name)
    return files


def _report(work: _Work, files: dict[str, bytes | str], folder: Path) -> dict[str, Any]:
    whose, bench, plan = work.whose, work.whose.bench, work.whose.plan
    x, y = bench.x_test.cpu(), bench.y_test.cpu()
    task = whose.world.task
    before, after = (
        float(task.right(task.answers(said.view(task.shape(y, -1)), y), y).float().mean())
        for said in (_outputs(work.module, x, bench.batch), reference.outputs(work.quantised, x))
    )
    return {
        "tier": plan.tier.name,
        "device": plan.profile.name,
        "client": whose.client,
        "personal": whose.method.as_set.personal,
        "method": whose.method.as_set.title,
        "round": whose.round,
        "parameters": sum(p.numel() for p in work.module.parameters()),
        "calibration_rows": work.rows,
        "test_rows": len(y),
        "tested_on": whose.tested_on,
        "score": task.score,
        "score_float": before,
        "score_int8": after,
        "ram": {
            **work.sizes.ram,
            "total": work.sizes.ram_bytes,
            "there": int(plan.profile.ram_bytes.value),
        },
        "flash": {
            **work.sizes.flash,
            "total": work.sizes.flash_bytes,
            "there": int(plan.profile.flash_bytes.value),
        },
        "flash_how": work.sizes.how,
        "flash_estimate": work.sizes.estimate,
        "folder": str(folder),
        "files": {name: len(data) for name, data in files.items()},
        "version": __version__,
    }


@torch.no_grad()
def _outputs(module: nn.Module, x: Tensor, batch: int) -> Tensor:
    return torch.cat([module(part) for part in x.split(batch)])


def export_table(report: dict[str, Any]) -> Table:
    """The report as a table."""
    table = Table(
        "what", "value", title=f"{report['tier']} ({report['device']}), round {report['round']}"
    )
    lost = 100 * (report["score_float"] - report["score_int8"])
    table.add_row("parameters", f"{report['parameters']:,}")
    table.add_row(
        f"{report['score']} in float32",
        f"{report['score_float']:.2%} of {report['test_rows']:,} {report['tested_on']}",
    )
    table.add_row(f"{report['score']} in int8", f"{report['score_int8']:.2%} ({-lost:+.2f} points)")
    for kind, mark in (("ram", ""), ("flash", "~" if report["flash_estimate"] else "")):
        parts = dict(report[kind])
        total, there = parts.pop("total"), parts.pop("there")
        split = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items())
        table.add_row(
            f"{kind.upper() if kind == 'ram' else kind} on it",
            f"{mark}{show_bytes(total)} of {show_bytes(there)}: {split}",
        )
    table.add_row("flash figure", report["flash_how"])
    for file, size in report["files"].items():
        table.add_row("wrote", f"{Path(report['folder']) / file} ({show_bytes(size)})")
    return table
