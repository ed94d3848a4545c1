"""What there is: methods, devices, networks, and which piece fits where, as rows and as tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from nestling.devices import Budget, FleetConfig, catalogue, device, fit, mark
from nestling.devices.fleet import make_fleet
from nestling.devices.units import show_bytes
from nestling.experiment import fleet_of
from nestling.methods import ALIASES, METHODS, method_class
from nestling.models import MODELS
from nestling.runs.assemble import reference_network
from nestling.sections import Section
from nestling.views.cutting import cutting
from nestling.world import Plan, plan_tiers, ratio_cost

Rows = list[dict[str, Any]]


def method_rows() -> Rows:
    """Every method with what it is for."""
    others = {
        name: [alias for alias, meant in ALIASES.items() if meant == name] for name in METHODS
    }
    return [
        {"name": name, "aliases": others[name], **asdict(method_class(name).info)}
        for name in METHODS
    ]


def method_table(rows: Rows) -> Table:
    """The methods as a table."""
    table = Table(
        "method",
        "family",
        "what may differ",
        "tasks",
        "extra data",
        "global model",
        "group",
        "paper",
        "evidence",
    )
    for r in rows:
        whole = "yes" if r["global_model"] else "no"
        group = r["group"] or "all"
        table.add_row(
            "\n".join([r["name"], *(f"[dim]{alias}[/dim]" for alias in r["aliases"])]),
            r["family"],
            r["heterogeneity"],
            "any" if r["any_task"] else "classes",
            r["auxiliary"],
            whole,
            group,
            r["paper"],
            r["evidence"],
        )
    return table


def device_rows() -> Rows:
    """Every device of the catalogue, each number with its source."""
    rows = []
    for profile in catalogue().values():
        figures = {name: asdict(figure) for name, figure in profile.figures().items()}
        rows.append(
            {
                "name": profile.name,
                "title": profile.title,
                "kind": profile.kind,
                "core": profile.core,
                "runtime": profile.runtime,
                **figures,
            }
        )
    return rows


def device_table(_rows: Rows) -> Table:
    """The devices as a table."""
    table = Table(
        "device",
        "kind",
        "core",
        "RAM",
        "flash",
        "MAC/s",
        "power",
        "link up",
        caption="~ marks an estimate; the rest is datasheet or measured",
    )
    for profile in catalogue().values():
        table.add_row(
            profile.name,
            profile.kind,
            profile.core,
            mark(profile.ram_bytes) + show_bytes(float(profile.ram_bytes)),
            mark(profile.flash_bytes) + show_bytes(float(profile.flash_bytes)),
            f"{mark(profile.macs_per_second)}{float(profile.macs_per_second):.3g}",
            f"{mark(profile.power_w)}{float(profile.power_w):.3g} W",
            f"{mark(profile.up_bps)}{float(profile.up_bps) / 1e6:.3g} Mbit/s",
        )
    return table


def model_rows() -> Rows:
    """Every network."""
    return [
        {"name": n, "title": i.title, "input": i.input, "norm": i.norm, "note": i.note}
        for n, i in MODELS.items()
    ]


def model_table(rows: Rows) -> Table:
    """The networks as a table."""
    table = Table("model", "what", "input", "default norm", "note")
    for r in rows:
        table.add_row(*(str(r[k]) for k in ("name", "title", "input", "norm", "note")))
    return table


def setting_rows(section: Section) -> Rows:
    """Every setting of a section."""
    return [{"section": section.name, **asdict(row)} for row in section.rows]


def setting_table(section: Section) -> Table:
    """The settings of a section as a table."""
    # What is written in brackets is meant so: no cell is markup.
    title = Text(f"{section.name}: {section.text.split(chr(10))[0]}")
    columns = ("setting", "type", "allowed", "default", "meaning")
    table = Table(*columns, title=title, title_justify="left", show_lines=True)
    table.columns[0].no_wrap = True
    for row in section.rows:
        cells = (row.key, row.type, row.allowed, row.default, row.meaning)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def fit_rows(
    model: str,
    shape: tuple[int, ...],
    classes: int,
    budget: Budget,
    device_name: str | None,
    fleet: Path | None,
) -> Rows:
    """The largest piece for one device or for every tier of a fleet."""
    main = reference_network(model, {}, shape, classes, 0, "main")
    cut = asdict(cutting(main))
    if fleet is None:
        assert device_name is not None
        found = fit(device(device_name), lambda ratio: ratio_cost(main, ratio), budget)
        return [
            {
                "tier": device_name,
                "count": 1,
                "whole": ratio_cost(main, 1.0).params,
                "cut": cut,
                **asdict(found),
            }
        ]
    made = make_fleet(fleet_of(FleetConfig(path=str(fleet))), 0)
    own = {
        t.name: reference_network(t.model, t.model_options, shape, classes, 0, t.name)
        for t in made.tiers
        if t.model
    }
    plans = plan_tiers(made, own, main, budget)
    return [
        {**_plan_row(plan, made.count_of(plan.tier), ratio_cost(main, 1.0).params), "cut": cut}
        for plan in plans.values()
    ]


def _plan_row(plan: Plan, count: int, whole: int) -> dict[str, Any]:
    found = (
        asdict(plan.fit)
        if plan.fit
        else {
            "device": plan.tier.device,
            "ratio": plan.ratio,
            "params": plan.cost.params,
            "need": None,
            "binding": "",
            "reasons": (),
        }
    )
    return {"tier": plan.tier.name, "count": count, "whole": whole, **found}


def fit_table(model: str, rows: Rows) -> Table:
    """What fits, as a table."""
    table = Table(
        "tier",
        "devices",
        "width",
        "parameters",
        "of full",
        "RAM needed",
        "RAM there",
        "flash",
        "time a round",
        "bound by",
        title=f"{model}: the largest piece that trains",
    )
    for r in rows:
        need, limits = r["need"] or {}, r.get("limits") or {}
        table.add_row(
            r["tier"],
            str(r["count"]),
            f"{r['ratio']:g}" if r["ratio"] else "nothing fits",
            f"{r['params']:,}",
            f"{r['params'] / r['whole']:.1%}",
            show_bytes(need["ram"]) if need else "–",
            show_bytes(limits["ram"]) if limits else "–",
            show_bytes(need["flash"]) if need else "–",
            f"~{need['seconds']:.3g} s" if need else "–",
            r["binding"] or "–",
        )
    return table
