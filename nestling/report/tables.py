"""The per-tier table: what each tier trains, whether it fits and how well it does, as data and for
the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from nestling.report.folder import last_best, listed, mapping, read_run, summarise
from nestling.report.words import DASH, memory, number, percent, plural, whole
from nestling.runfiles import score_word, tier_block

# A figure is an estimate when anything it is worked out from is one.
_SPEED = ("seconds", "time", "speed", "macs", "fp32")
_ROOTS = {
    "ram": ("ram",),
    "flash": ("flash",),
    "seconds": _SPEED,
    "energy": ("energy", "power", *_SPEED),
}


def tier_rows(
    summary: Mapping[str, Any] | None, federation: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """One row per tier: the federation's tiers in their order, then those only the summary knows.
    Unknown figures are None."""
    summary, federation = summary or {}, federation or {}
    model = mapping(federation, "model")
    tiers = [tier for tier in listed(federation, "tiers") if tier.get("name") is not None]
    known = {str(tier["name"]) for tier in tiers}
    tiers += [{"name": name} for name in mapping(summary, "by_tier") if name not in known]
    labels = _labels(tiers)
    return [
        _row(tier, label, model) | _scores(tier_block(summary, str(tier["name"])))
        for tier, label in zip(tiers, labels, strict=True)
    ]


def overall_row(summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """The columns of scores of `tier_rows` for the whole federation."""
    return _scores(summary or {})


def terminal_table(folder: Path) -> Table:
    """The per-tier table of a run folder, for the terminal."""
    run = read_run(folder)
    summary = summarise(run)
    rows, overall = tier_rows(summary, run.federation), overall_row(summary)
    # Bare of lines and padding, so that it fits the 80 columns of a plain terminal.
    table = Table(
        title=escape(_title(summary, run.name)),
        title_justify="left",
        caption=_caption(rows),
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("tier", no_wrap=True)
    for name in (
        "no.",
        "params",
        "RAM\nneeded",
        "RAM\nthere",
        "global\nlast",
        "global\nbest",
        "personal\nlast",
        "personal\nbest",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            escape(row["tier"]),
            whole(row["count"]),
            whole(row["params"]),
            memory(row["ram_need"]),
            marked(row, "ram", memory(row["ram_limit"])),
            *_score_texts(row),
        )
    table.add_section()
    table.add_row("all", *[""] * 4, *_score_texts(overall), style="bold")
    return table


def marked(row: Mapping[str, Any], column: str, text: str) -> str:
    """`text` with the mark "~" where the column's figure is an estimate."""
    return f"~{text}" if column in row["estimated"] and text != DASH else text


def binding_word(row: Mapping[str, Any]) -> str:
    """What binds the tier, as it is written in a sentence."""
    word = str(row["binding"] or DASH)
    return {"ram": "RAM", "seconds": "time"}.get(word, word)


def _row(tier: Mapping[str, Any], label: str, model: Mapping[str, Any]) -> dict[str, Any]:
    need, limits = mapping(tier, "need"), mapping(tier, "limits")
    params, full = number(tier.get("params")), number(model.get("params"))
    reasons = tier.get("reasons")
    return {
        "tier": str(tier["name"]),
        "label": label,
        "count": number(tier.get("count")),
        "device": tier.get("device"),
        "kind": tier.get("kind"),
        "core": tier.get("core"),
        "board": tier.get("board"),
        "model": tier.get("model"),
        "own_model": None not in (tier.get("model"), model.get("name"))
        and tier.get("model") != model.get("name"),
        "ratio": number(tier.get("ratio")),
        "params": params,
        "zeros": number(tier.get("zeros")),
        "share": params / full if params is not None and full else None,
        "macs": number(tier.get("macs")),
        **{f"{key}_need": number(need.get(key)) for key in ("ram", "flash", "seconds", "energy")},
        **{f"{key}_limit": number(limits.get(key)) or None for key in ("ram", "flash", "seconds")},
        "binding": tier.get("binding"),
        "reasons": [str(reason) for reason in reasons] if isinstance(reasons, list) else [],
        "estimated": _estimated(mapping(tier, "sources")),
    }


def _scores(block: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for kind in ("global", "personal"):
        row[f"{kind}_last"], row[f"{kind}_best"], row[f"{kind}_best_round"] = last_best(
            block.get(f"{kind}_score")
        )
    return row


def _labels(tiers: Sequence[Mapping[str, Any]]) -> list[str]:
    """A device's title, with the tier's name beside it where two tiers use the same device."""
    titles = [str(tier.get("title") or tier["name"]) for tier in tiers]
    seen = Counter(titles)
    return [
        title if seen[title] == 1 else f"{title} ({tier['name']})"
        for title, tier in zip(titles, tiers, strict=True)
    ]


def _estimated(sources: Mapping[str, Any]) -> list[str]:
    guessed = [key for key, source in sources.items() if str(source).lower().startswith("estimate")]
    return [
        column for column, roots in _ROOTS.items() if any(key.startswith(roots) for key in guessed)
    ]


def _score_texts(row: Mapping[str, Any]) -> list[str]:
    return [
        percent(row[key], 2)
        for key in ("global_last", "global_best", "personal_last", "personal_best")
    ]


def _title(summary: Mapping[str, Any], name: str) -> str:
    done, rounds = number(summary.get("rounds_done")), number(summary.get("rounds"))
    of = (
        f"{whole(done)} of {plural(rounds, 'round')}"
        if rounds is not None and done != rounds
        else plural(done, "round")
    )
    method = summary.get("title") or summary.get("method") or name
    on = f" on {summary['data']}" if summary.get("data") else ""
    return f"{method}{on}, {of}: {score_word(summary)} by tier"


def _caption(rows: Sequence[Mapping[str, Any]]) -> str | None:
    return "~ an estimate" if any("ram" in row["estimated"] for row in rows) else None
