"""The export of a run's model for one kind of its devices: the files, and a report of what was lost
and what it takes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from nestling.runs.evaluation import Bench, ready
from nestling.runs.federation import Federation
from nestling.runs.run import Result, need_models, opened
from nestling.seeds import stream
from nestling.version import __version__
from nestling.world import Plan, World

FORMATS = ("c", "tflite", "onnx")
REPORT = "export.json"
CALIBRATION = 500
MOST_CLIENTS = 100
"""The calibration rows come from at most this many clients."""


@dataclass(frozen=True, eq=False)
class _Work:
    """A model on its way out."""

    plan: Plan
    client: int
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

    The model is quantised with `calibration` rows that clients trained on. What does not fit the
    device is refused. `trust` names the code that a run folder may have imported, as for `resume`.
    Beside the files lies a manifest of their digests, signed where `sign` names a private key.
    """
    key = private_key(Path(sign)) if sign is not None else None
    for word in formats:
        if word not in FORMATS:
            raise unknown("format", word, FORMATS, field="--format")
    if calibration < 1:
        raise InputError(
            f"{calibration} rows to calibrate with", field="--calibration", fix="give at least 1"
        )
    with _result(run, trust) as result:
        need_models(result)
        work = _prepare(result.federation, device, calibration)
        folder = _folder(result, work.plan.tier.name, out)
        files = _files(work, result.federation, formats, name)
        report = _report(work, result.federation, files, folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        written = {**files, REPORT: json.dumps(report, indent=1)}
        raw = {n: data.encode() if isinstance(data, str) else data for n, data in written.items()}
        manifest = manifest_of(raw)
        # An old signature would be that of other files.
        (folder / SIGNATURE).unlink(missing_ok=True)
        for file, data in {**raw, MANIFEST: manifest}.items():
            write_atomic(folder / file, data)
        if key is not None:
            write_atomic(folder / SIGNATURE, key.sign(manifest))
    return report


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


def _prepare(federation: Federation, device: str, calibration: int) -> _Work:
    world = federation.world
    plan = find_tier(world, device)
    client = world.fleet.member(plan.tier.name, 0)
    model = federation.shown.model_for(world.device(client))
    if model is None:
        raise InputError(
            f"{federation.method.as_set.title} has no model for {plan.tier.name}", field="--device"
        )
    module = copy.deepcopy(ready(model, federation.bench)).cpu().eval()
    network = fold(module, world.main.shape)
    rows = calibration_rows(world, federation.bench, calibration)
    quantised = quantise(network, rows)
    needed = sizes(quantised, plan.profile)
    require_room(needed, plan.profile)
    return _Work(plan, client, module, network, quantised, len(rows), needed)


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


def calibration_rows(world: World, bench: Bench, count: int) -> Tensor:
    """That many rows that clients trained on, or all there are; neither test rows nor rows that a
    client holds out."""
    fleet, share = world.fleet, max(1, MOST_CLIENTS // len(world.plans))
    clients = [
        fleet.member(tier, k)
        for tier in world.plans
        for k in range(min(share, fleet.count_of(tier)))
    ]
    rows = np.unique(np.concatenate([world.split.indices(client) for client in clients]))
    chosen = stream(world.seed, "export calibration").permutation(rows)[:count]
    return bench.x[torch.from_numpy(chosen).to(bench.x.device)].cpu()


def _files(
    work: _Work, federation: Federation, formats: tuple[str, ...], name: str
) -> dict[str, bytes | str]:
    files: dict[str, bytes | str] = {}
    if "c" in formats:
        files.update(c_source.write(work.quantised, name))
    if "tflite" in formats:
        files[f"{name}.tflite"] = tflite.write(work.quantised, name)
    if "onnx" in formats:
        files[f"{name}.onnx"] = onnx_file.write(work.network, federation.world.main.shape, name)
    return files


def _report(
    work: _Work, federation: Federation, files: dict[str, bytes | str], folder: Path
) -> dict[str, Any]:
    bench, plan = federation.bench, work.plan
    x, y = bench.x_test.cpu(), bench.y_test.cpu()
    before, after = (
        _accuracy(work.module, x, y, bench.batch),
        reference.accuracy(work.quantised, x, y),
    )
    return {
        "tier": plan.tier.name,
        "device": plan.profile.name,
        "client": work.client,
        "personal": federation.method.as_set.personal,
        "method": federation.method.as_set.title,
        "round": federation.totals.round,
        "parameters": sum(p.numel() for p in work.module.parameters()),
        "calibration_rows": work.rows,
        "test_rows": len(y),
        "accuracy_float": before,
        "accuracy_int8": after,
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
def _accuracy(module: nn.Module, x: Tensor, y: Tensor, batch: int) -> float:
    found = torch.cat([module(part).argmax(-1) for part in x.split(batch)])
    return float((found == y).float().mean())


def export_table(report: dict[str, Any]) -> Table:
    """The report as a table."""
    table = Table(
        "what", "value", title=f"{report['tier']} ({report['device']}), round {report['round']}"
    )
    lost = 100 * (report["accuracy_float"] - report["accuracy_int8"])
    table.add_row("parameters", f"{report['parameters']:,}")
    table.add_row(
        "accuracy in float32",
        f"{report['accuracy_float']:.2%} of {report['test_rows']:,} test rows",
    )
    table.add_row("accuracy in int8", f"{report['accuracy_int8']:.2%} ({-lost:+.2f} points)")
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
