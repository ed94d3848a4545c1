"""The page of one run, part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from nestling.report.analysis_part import analysis_part
from nestling.report.boards_part import boards_part
from nestling.report.charts import BYTES, JOULES, LOSS, ROUNDS, SECONDS, chart, score_axis
from nestling.report.coverage_part import coverage_part
from nestling.report.fleet_parts import device_part, fit_part, split_part
from nestling.report.folder import (
    Run,
    is_behind,
    last_best,
    listed,
    mapping,
    running_totals,
    summarise,
    traffic_totals,
)
from nestling.report.history_part import history_part
from nestling.report.markup import (
    Cell,
    Column,
    empty,
    fill,
    folded,
    joined,
    note,
    pairs,
    section,
    side_by_side,
    source,
    table,
)
from nestling.report.metrics_part import metrics_part
from nestling.report.svg import INK, Axis, Series
from nestling.report.tables import overall_row, tier_rows
from nestling.report.unequal_part import unequal_chart, worst_clients
from nestling.report.words import (
    DASH,
    capital,
    decimal,
    duration,
    energy,
    number,
    percent,
    plural,
    traffic,
    whole,
)
from nestling.runfiles import score_word, tier_block

Row = Mapping[str, Any]
_MOST_ROUNDS_LISTED = 400
_MOST_CLIENTS_LISTED = 200
_NOT_EVALUATED = "Not evaluated."
RUN_PARTS = [
    ("scores", "{score}"),
    ("personal", "Personal"),
    ("metrics", "Metrics"),
    ("coverage", "Coverage"),
    ("history", "Clients"),
    ("fit", "What fits"),
    ("boards", "Boards"),
    ("split", "Data split"),
    ("devices", "Devices"),
    ("analysis", "Clients compared"),
    ("rounds", "Rounds"),
    ("origin", "Configuration"),
]
_ROUND_COLUMNS: list[tuple[str, str, Callable[[object], str]]] = [
    ("Loss", "loss", decimal),
    ("Global", "global_score", lambda value: percent(value, 2)),
    ("Personal", "personal_score", lambda value: percent(value, 2)),
    ("Up", "bytes_up", traffic),
    ("Down", "bytes_down", traffic),
    ("Virtual time", "clock_seconds", duration),
    ("Energy", "energy_joules", energy),
    ("Wall time", "seconds", duration),
    ("Refused", "refused", whole),
    ("Late", "late", whole),
    ("Dropped", "dropped", whole),
]


def run_parts(run: Run) -> list[tuple[str, str]]:
    """The parts that a page may have, as (id, name); the first is called as the task calls its
    score."""
    word = capital(score_word(summarise(run)))
    return [(ident, name.replace("{score}", word)) for ident, name in RUN_PARTS]


def run_title(run: Run) -> str:
    """What the browser's tab says."""
    summary = summarise(run)
    return f"{_method(run, summary)} · {summary.get('data') or run.name} · Nestling"


def run_body(run: Run) -> Markup:
    """Everything between the page's top and its end."""
    summary = summarise(run)
    rows = tier_rows(summary, run.federation)
    return joined(
        [
            _header(run, summary),
            _scores(run, summary, rows),
            _personal(run, summary, rows),
            metrics_part(run, summary),
            coverage_part(run),
            history_part(run, rows),
            fit_part(run, rows),
            boards_part(run),
            split_part(run, rows),
            device_part(rows),
            analysis_part(run, rows),
            _rounds(run),
            _origin(run, summary),
        ]
    )


def analysis_body(run: Run) -> Markup:
    """The page of the analysis alone; nothing where the run has none."""
    summary = summarise(run)
    part = analysis_part(run, tier_rows(summary, run.federation))
    return _header(run, summary) + part if part else part


def _header(run: Run, summary: Row) -> Markup:
    done, state = _state(run, summary)
    facts = [
        summary.get("data"),
        summary.get("model"),
        _tier_count(run),
        f"seed {summary['seed']}" if summary.get("seed") is not None else None,
    ]
    word = score_word(summary)
    without = (
        "This method keeps no global model."
        if summary.get("global_model") is False
        else _NOT_EVALUATED
    )
    return fill(
        "run_header.html",
        method=_method(run, summary),
        facts=facts,
        done=done,
        state=state,
        attack=_attack(run),
        headlines=[
            (f"Global {word}", *last_best(summary.get("global_score")), without),
            (f"Personal {word}", *last_best(summary.get("personal_score")), _NOT_EVALUATED),
        ],
        costs=_costs(summary),
    )


def _attack(run: Run) -> str:
    """What the head must say of a run whose clients were made to lie; nothing of any other."""
    asked = mapping(run.config, "attack")
    if asked.get("kind", "none") == "none":
        return ""
    return f"Under attack: {percent(asked.get('share'))} of the clients lie ({asked['kind']})"


def _costs(summary: Row) -> list[tuple[str, str]]:
    lost = [(key.capitalize(), whole(summary.get(key))) for key in ("refused", "late", "dropped")]
    if summary.get("empty_rounds"):
        lost.append(("Rounds that merged nothing", whole(summary["empty_rounds"])))
    return [
        ("Sent up", traffic(summary.get("bytes_up"))),
        ("Sent down", traffic(summary.get("bytes_down"))),
        ("Virtual time", duration(summary.get("clock_seconds"))),
        ("Wall time", duration(summary.get("seconds"))),
        ("Fleet energy", energy(summary.get("energy_joules"))),
        *lost,
    ]


def _scores(run: Run, summary: Row, rows: Sequence[Row]) -> Markup:
    word = score_word(summary)
    title = f"{capital(word)} by tier"
    rounds = _lines(run, rows, "global_score", "Global model", _round_numbers(run))
    nothing = (
        "this method keeps no global model."
        if summary.get("global_model") is False
        else "no round has been evaluated yet."
    )
    charts = [
        chart(
            rounds,
            title=f"{title} over rounds",
            note="The global model, and the piece of it each tier runs.",
            x=ROUNDS,
            y=score_axis(word),
            ident="c-rounds",
            nothing=nothing,
        )
    ]
    charts += _over_costs(run, rows, word, title)
    listing = _tier_table(summary, rows, word, title)
    return section("scores", title, "", side_by_side(charts) + listing)


def _over_costs(run: Run, rows: Sequence[Row], word: str, title: str) -> list[Markup]:
    """The same scores against what they cost; nothing of a cost that the run does not know."""
    costs: list[tuple[str, str, Axis, list[float]]] = [
        ("bytes", "everything sent up and down", BYTES, traffic_totals(run)),
        ("time", "the fleet's virtual time", SECONDS, running_totals(run, "clock_seconds")),
        ("energy", "what all devices use together", JOULES, running_totals(run, "energy_joules")),
    ]
    charts = []
    for name, words, axis, places in costs:
        lines = _lines(run, rows, "global_score", "Global model", places)
        if any(line.points for line in lines) and any(places):
            charts.append(
                chart(
                    lines,
                    title=f"{title} over {name}",
                    note=f"The same, against {words}.",
                    x=axis,
                    y=score_axis(word),
                    ident=f"c-{name}",
                    nothing="",
                )
            )
    return charts


def _tier_table(summary: Row, rows: Sequence[Row], word: str, title: str) -> Markup:
    columns = [Column("Tier", numeric=False), Column("Devices")]
    columns += [
        Column(label, group=group)
        for group in (f"Global {word}", f"Personal {word}")
        for label in ("last", "best", "best round")
    ]
    body = [
        [
            Cell(row["label"], style=index),
            Cell(whole(row["count"]), row["count"]),
            *_score_cells(row),
        ]
        for index, row in enumerate(rows)
    ]
    counts = [row["count"] for row in rows if row["count"] is not None]
    foot = [
        Cell("All", style=INK),
        Cell(whole(sum(counts)) if counts else DASH),
        *_score_cells(overall_row(summary)),
    ]
    return table(columns, body, label=title, foot=foot)


def _score_cells(row: Row) -> list[Cell]:
    return [
        cell
        for kind in ("global", "personal")
        for cell in (
            Cell(percent(row[f"{kind}_last"], 2), row[f"{kind}_last"]),
            Cell(percent(row[f"{kind}_best"], 2), row[f"{kind}_best"]),
            Cell(whole(row[f"{kind}_best_round"]), row[f"{kind}_best_round"]),
        )
    ]


def _personal(run: Run, summary: Row, rows: Sequence[Row]) -> Markup:
    word = score_word(summary)
    personal = chart(
        _lines(run, rows, "personal_score", "All clients", _round_numbers(run)),
        title=f"Personal {word} over rounds",
        note="Each client's own model on its own kind of data.",
        x=ROUNDS,
        y=score_axis(word),
        ident="c-personal",
        nothing="not evaluated in this run.",
    )
    loss = chart(
        _lines(run, rows, "loss", "All clients", _round_numbers(run)),
        title="Training loss over rounds",
        note="Mean over the clients that trained in the round.",
        x=ROUNDS,
        y=LOSS,
        ident="c-loss",
        nothing="no round has finished yet.",
    )
    charts = [one for one in (personal, unequal_chart(run, word), loss) if one]
    body = side_by_side(charts) + worst_clients(run, word, rows)
    return section("personal", f"Personal {word} and training", "", body)


def _lines(
    run: Run, rows: Sequence[Row], key: str, overall: str, at: Sequence[float]
) -> list[Series]:
    """One series for everybody and one per tier; a round that was not evaluated leaves no point."""

    def points(values: Sequence[object]) -> list[tuple[float, float]]:
        return [
            (x, found)
            for x, value in zip(at, values, strict=True)
            if (found := number(value)) is not None
        ]

    everybody = Series(overall, points([record.get(key) for record in run.metrics]), INK)
    return [
        everybody,
        *(
            Series(
                row["label"],
                points([tier_block(record, row["tier"]).get(key) for record in run.metrics]),
                index,
            )
            for index, row in enumerate(rows)
        ),
    ]


def _rounds(run: Run) -> Markup:
    if not run.metrics:
        return section("rounds", "Round by round", "", empty("No round has finished yet."))
    every = -(-len(run.metrics) // _MOST_ROUNDS_LISTED)
    shown = run.metrics[::-1][::every][::-1]
    columns = [Column("Round"), Column("Clients"), *(Column(name) for name, _, _ in _ROUND_COLUMNS)]
    listing = table(columns, [_round_cells(record) for record in shown], label="Round by round")
    if every > 1:
        listing += note(
            f"One round in {every} is listed; metrics.jsonl holds all {whole(len(run.metrics))}."
        )
    shown_rounds = folded(f"Show {plural(len(shown), 'round')}", listing)
    return section("rounds", "Round by round", "", shown_rounds + _objections(run))


def _objections(run: Run) -> Markup:
    """Client by client, how often its replies were refused or clipped, and why last; nothing where
    nobody's were."""
    found: dict[int, dict[str, Any]] = {}
    for record in run.metrics:
        for kind in ("refusals", "clipped"):
            for told in listed(record, kind):
                client = number(told.get("client"))
                if client is not None:
                    row = found.setdefault(int(client), {"refusals": 0, "clipped": 0})
                    row[kind] += 1
                    row["why"] = f"round {whole(record['round'])}: {told.get('reason')}"
    if not found:
        return Markup()
    columns = [Column("Client"), Column("Refused"), Column("Clipped")]
    columns.append(Column("The last time", numeric=False))
    most = sorted(found.items(), key=lambda item: -item[1]["refusals"] - item[1]["clipped"])
    body = [
        [
            Cell(whole(client), client),
            Cell(whole(row["refusals"]), row["refusals"]),
            Cell(whole(row["clipped"]), row["clipped"]),
            Cell(row["why"]),
        ]
        for client, row in most[:_MOST_CLIENTS_LISTED]
    ]
    listing = table(columns, body, label="Refused and clipped by client")
    said = f"Replies of {plural(len(found), 'client')} were refused or clipped"
    return folded(said, listing)


def _round_cells(record: Row) -> list[Cell]:
    clients = record.get("clients")
    count = len(clients) if isinstance(clients, list) else number(clients)
    return [
        Cell(whole(record["round"]), record["round"]),
        Cell(whole(count), count),
        *(Cell(form(record.get(key)), number(record.get(key))) for _, key, form in _ROUND_COLUMNS),
    ]


def _origin(run: Run, summary: Row) -> Markup:
    versions = mapping(summary, "versions")
    entries = [
        ("Folder", run.name),
        ("Commit", str(summary.get("commit") or DASH)),
        *((str(name), str(value)) for name, value in versions.items()),
    ]
    config = (
        folded("Show experiment.toml", source(run.config_text))
        if run.config_text
        else empty("The run folder has no experiment.toml.")
    )
    return section(
        "origin",
        "Configuration and versions",
        "The complete configuration of this run, and what it ran with.",
        config + pairs(entries, "versions card"),
    )


def _state(run: Run, summary: Row) -> tuple[bool, str]:
    done, rounds = number(summary.get("rounds_done")) or 0, number(summary.get("rounds"))
    if not is_behind(run) and (rounds is None or done >= rounds):
        return True, f"{plural(done, 'round')}, finished"
    of = (
        f"{whole(done)} of {plural(rounds, 'round')}"
        if rounds is not None
        else plural(done, "round")
    )
    return False, f"{of}, not finished"


def _method(run: Run, summary: Row) -> str:
    return str(summary.get("title") or summary.get("method") or run.name)


def _tier_count(run: Run) -> str | None:
    tiers = listed(run.federation, "tiers")
    devices = [found for tier in tiers if (found := number(tier.get("count"))) is not None]
    return f"{plural(sum(devices), 'device')} in {plural(len(tiers), 'tier')}" if devices else None


def _round_numbers(run: Run) -> list[float]:
    return [float(record["round"]) for record in run.metrics]
