"""The parts of a run's page that tell of the fleet: what each tier trains and why it fits, the data
split, the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from nestling.report.folder import Run, listed, mapping, of_classes
from nestling.report.markup import Cell, Column, empty, fill, note, section, table
from nestling.report.svg import INK, Bar, SvgGroup, bars, heat_map, shade
from nestling.report.tables import binding_word, marked
from nestling.report.words import (
    DASH,
    decimal,
    duration,
    energy,
    memory,
    number,
    percent,
    plural,
    short,
    whole,
)

Row = Mapping[str, Any]
_MOST_REASONS_BESIDE = 3
_ESTIMATES = "~ marks an estimate; the other device figures come from datasheets or measurements."
_MEMORY = "KB, MB and GB of RAM and flash are powers of 1024; traffic is counted in powers of 1000."


def fit_part(run: Run, rows: Sequence[Row]) -> Markup:
    """What each tier trains, what that needs, what the device has, and what bound the choice."""
    model = mapping(run.federation, "model")
    title = "What each device trains and why it fits"
    if not rows:
        return section(
            "fit", title, "", empty("The run folder does not say which tiers there are.")
        )
    full = (
        f"The full model, {model['name']}, has {whole(model.get('params'))} parameters. "
        if model.get("name")
        else ""
    )
    lead = full + "Bars show what training needs against what the device has."
    cards = [_fit_card(row, index) for index, row in enumerate(rows)]
    return section("fit", title, lead, fill("fit.html", cards=cards))


def _fit_card(row: Row, index: int) -> Row:
    about = [
        plural(row["count"], "device") if row["count"] is not None else None,
        row["kind"],
        row["core"],
        _board(row),
    ]
    return {
        "label": row["label"],
        "about": [part for part in about if part],
        "facts": [
            ("Parameters", whole(row["params"])),
            *(
                [("Of them always zero", percent(row["zeros"] / row["params"]))]
                if row["zeros"] and row["params"]
                else []
            ),
            ("Of full model", percent(row["share"])),
            ("Network" if row["own_model"] else "Width", _width(row)),
            ("MACs a sample", short(row["macs"])),
        ],
        "bars": _need_bars(row, index),
        "without_bars": "No piece fits."
        if row["ram_limit"] is not None
        else "No device profile: nothing limits this tier.",
        "bound": _bound(row),
        "binding": binding_word(row) if row["binding"] else None,
        "reasons": row["reasons"],
        "reasons_below": len(row["reasons"]) > _MOST_REASONS_BESIDE,
    }


def _board(row: Row) -> str | None:
    if not row["board"]:
        return None
    return (
        "firmware's arithmetic on this machine"
        if row["board"] == "host"
        else f"firmware on {row['board']}"
    )


def _width(row: Row) -> str:
    if row["own_model"]:
        return str(row["model"])
    return DASH if row["ratio"] is None else f"×{decimal(row['ratio'])}"


def _need_bars(row: Row, index: int) -> Markup | None:
    known = [
        _need_bar(row, key, label, form)
        for key, label, form in (
            ("ram", "RAM", memory),
            ("flash", "Flash", memory),
            ("seconds", "Time", duration),
        )
    ]
    drawn = [bar for bar in known if bar is not None]
    if not drawn:
        return None
    desc = "; ".join(f"{bar.label}: {bar.text}" for bar in drawn)
    return bars(
        drawn,
        title=f"What {row['label']} needs against what it has",
        desc=desc,
        ident=f"fit-{index}",
    )


def _need_bar(row: Row, key: str, label: str, form: Callable[[object], str]) -> Bar | None:
    need, limit = row[f"{key}_need"], row[f"{key}_limit"]
    if need is None or (limit is None and key == "seconds"):
        return None
    needed = marked(row, key, form(need)) if key == "seconds" else form(need)
    if limit is None:
        return Bar(label, None, f"{needed}, no limit")
    share = need / limit
    had = marked(row, key, form(limit)) if key != "seconds" else form(limit)
    return Bar(label, share, f"{needed} of {had} ({_share(share)})")


def _share(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.01 or share == 0 else "<1%"


def _bound(row: Row) -> str:
    if row["binding"]:
        return "Nothing fits, for lack of" if row["ratio"] == 0 else "Bound by"
    return "Nothing binds: it trains the whole model" if row["ratio"] == 1 else "No limit binds"


def split_part(run: Run, rows: Sequence[Row]) -> Markup:
    """How the data lies: a map of classes, or kinds of rows, by clients, grouped by tier."""
    split = mapping(run.federation, "split")
    clients = [
        client for client in listed(split, "clients") if isinstance(client.get("counts"), list)
    ]
    names = _kind_names(split, clients)
    kind, kinds = ("class", "classes") if of_classes(run) else ("kind", "kinds")
    if not clients or not names:
        return section(
            "split", "Data split", "", empty("The run folder does not record the split.")
        )
    order = {row["tier"]: index for index, row in enumerate(rows)}
    labels = {row["tier"]: row["label"] for row in rows}
    clients.sort(key=lambda client: order.get(str(client.get("tier")), len(order)))
    counts = [
        [_count(client["counts"], index) for client in clients] for index in range(len(names))
    ]
    groups = tier_groups(clients, order, labels)
    title = f"Samples of each {kind} on each client"
    idents = [str(client.get("id", index)) for index, client in enumerate(clients)]
    image = heat_map(
        counts,
        rows=names,
        columns=idents,
        across="client",
        tell=lambda row, column: (
            f"client {idents[column]}, {kind} {names[row]}: {counts[row][column]:,.0f}"
        ),
        groups=groups,
        title=title,
        desc=f"{plural(len(names), kind, kinds)} by {plural(len(clients), 'client')}, "
        "grouped by tier; the stronger a cell's colour, the more samples.",
        ident="c-split",
    )
    body = fill(
        "heat.html",
        title=title,
        said=f"A column is a client, a row a {kind}.",
        image=image,
        groups=groups,
        counted="Samples",
        shades=shades_of(counts),
    )
    read = mapping(run.federation, "data").get("line")
    body += note(f"What was read: {read}.") if isinstance(read, str) else Markup("")
    return section("split", "Data split", _split_lead(split, len(clients)), body)


def _kind_names(split: Row, clients: Sequence[Row]) -> list[str]:
    given = split.get("kinds")
    names = [str(name) for name in given] if isinstance(given, list) else []
    classes = max((len(client["counts"]) for client in clients), default=0)
    return names + [str(index) for index in range(len(names), classes)]


def _split_lead(split: Row, shown: int) -> str:
    total = number(split.get("clients_total"))
    kind, alpha = split.get("kind"), number(split.get("alpha"))
    parts = (
        [
            f"{str(kind).capitalize()} "
            f"split{f' with α = {decimal(alpha)}' if alpha is not None else ''}"
        ]
        if kind
        else []
    )
    parts.append(
        f"{whole(total)} clients, {whole(shown)} of them shown"
        if total is not None and total > shown
        else plural(shown, "client")
    )
    if number(split.get("public")):
        parts.append(f"{plural(split['public'], 'public sample')} on the server")
    return "; ".join(parts) + "."


def tier_groups(
    clients: Sequence[Row], order: Mapping[str, int], labels: Mapping[str, str]
) -> list[SvgGroup]:
    """Neighbouring clients of one tier."""
    groups: list[SvgGroup] = []
    for client in clients:
        tier = str(client.get("tier"))
        label, style = labels.get(tier, "no tier"), order.get(tier, INK)
        size = groups.pop().columns if groups and groups[-1].style == style else 0
        groups.append(SvgGroup(label, style, size + 1))
    return groups


def shades_of(counts: Sequence[Sequence[float]]) -> list[tuple[str, str]]:
    """Some numbers of samples, and how strong the colour of their cells is."""
    most = max((value for row in counts for value in row), default=0)
    steps = sorted({round(most * share) for share in (1 / 25, 4 / 25, 9 / 25, 16 / 25, 1)} - {0})
    return [(whole(step), f"{shade(step, most):.2f}") for step in steps]


def _count(counts: Sequence[object], index: int) -> float:
    return (number(counts[index]) or 0) if index < len(counts) else 0


def device_part(rows: Sequence[Row]) -> Markup:
    """The devices' own figures, estimates marked."""
    if not rows:
        return section(
            "devices", "Devices", "", empty("The run folder does not say which devices there are.")
        )
    columns = [
        Column("Device", numeric=False),
        Column("Count"),
        Column("Core", numeric=False),
        Column("RAM"),
        Column("Flash"),
        Column("Time per round"),
        Column("Energy per round"),
    ]
    body = [
        [
            Cell(row["label"], style=index),
            Cell(whole(row["count"]), row["count"]),
            Cell(str(row["core"] or DASH)),
            Cell(marked(row, "ram", memory(row["ram_limit"])), row["ram_limit"]),
            Cell(marked(row, "flash", memory(row["flash_limit"])), row["flash_limit"]),
            Cell(marked(row, "seconds", duration(row["seconds_need"])), row["seconds_need"]),
            Cell(marked(row, "energy", energy(row["energy_need"])), row["energy_need"]),
        ]
        for index, row in enumerate(rows)
    ]
    guessed = any(row["estimated"] for row in rows)
    remark = f"{_ESTIMATES} {_MEMORY}" if guessed else _MEMORY
    return section("devices", "Devices", "", table(columns, body, label="Devices") + note(remark))
