"""Reading a run folder: its plain files, checked, and its summary even while the run is still
going."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nestling.errors import InputError
from nestling.files import parse_toml
from nestling.report.words import number
from nestling.runfiles import (
    ANALYSIS,
    BOARDS,
    COVERAGE,
    EXPERIMENT,
    FEDERATION,
    METRICS,
    SUMMARY,
    Record,
    counted,
    lines_of,
    parsed,
)


@dataclass(frozen=True)
class Run:
    """What lies in one run folder. `metrics` is in order of rounds; the JSON files are empty where
    absent."""

    folder: Path
    config_text: str
    config: Record
    metrics: list[Record]
    summary: Record
    federation: Record
    analysis: Record = field(default_factory=dict)
    boards: list[Record] = field(default_factory=list)  # a record for every job that a board did
    coverage: Record = field(default_factory=dict)  # how often each channel was trained

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name


def read_run(folder: Path) -> Run:
    """The run in `folder`; an `InputError` names the file, and the line where there is one, that
    cannot be used."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "there is no such folder"
        raise InputError(what, field=str(folder), fix="give the folder that `nestling run` wrote")
    metrics = _read_metrics(folder / METRICS)
    config_text = _text(folder / EXPERIMENT)
    return Run(
        folder,
        config_text,
        parse_toml(config_text, str(folder / EXPERIMENT)),
        metrics,
        _object(folder / SUMMARY),
        _object(folder / FEDERATION),
        _object(folder / ANALYSIS),
        lines_of(folder / BOARDS),
        _object(folder / COVERAGE),
    )


def summarise(run: Run) -> Record:
    """The run's summary in the form of summary.json, from metrics.jsonl where that file is missing
    or behind."""
    found = counted(run.metrics, tier_names(run))
    if run.summary and not is_behind(run):
        return found | {key: value for key, value in run.summary.items() if value is not None}
    return {**_identity(run), **run.summary, **found}


def is_behind(run: Run) -> bool:
    """True while a run is going: no summary yet, or one from before it was resumed."""
    done = number(run.summary.get("rounds_done"))
    return not run.summary or (done is not None and done < _last_round(run))


def last_best(block: object) -> tuple[float | None, float | None, int | None]:
    """(last, best, best round) of a summary's block of scores, None for whatever it lacks."""
    found = block if isinstance(block, Mapping) else {}
    best_round = number(found.get("best_round"))
    return (
        number(found.get("last")),
        number(found.get("best")),
        None if best_round is None else int(best_round),
    )


def traffic_totals(run: Run) -> list[float]:
    """Bytes sent up and down since the start, one figure per round."""
    totals, sent = [], 0.0
    for record in run.metrics:
        up, down = number(record.get("bytes_up_total")), number(record.get("bytes_down_total"))
        if up is None or down is None:
            sent += (number(record.get("bytes_up")) or 0) + (number(record.get("bytes_down")) or 0)
        else:
            sent = up + down
        totals.append(sent)
    return totals


def running_totals(run: Run, key: str) -> list[float]:
    """A total since the start, one figure per round; a round that does not say it is taken to have
    added nothing."""
    totals, last = [], 0.0
    for record in run.metrics:
        found = number(record.get(key))
        last = last if found is None else found
        totals.append(last)
    return totals


def tier_names(run: Run) -> list[str]:
    """Every tier the run speaks of: the federation's in its order, then any that only the metrics
    know."""
    names = {
        str(tier["name"]): None
        for tier in listed(run.federation, "tiers")
        if tier.get("name") is not None
    }
    for record in [*run.metrics, run.summary]:
        by_tier = record.get("by_tier")
        names |= dict.fromkeys(by_tier) if isinstance(by_tier, Mapping) else {}
    return list(names)


def of_classes(run: Run) -> bool:
    """Whether the run learns classes: earlier versions learned nothing else."""
    return mapping(run.federation, "task").get("name", "classification") == "classification"


def label_names(run: Run) -> list[str]:
    """What a network's outputs are called."""
    told = mapping(run.federation, "task").get("labels")
    names = told if told is not None else mapping(run.federation, "split").get("kinds")
    return [str(name) for name in names] if isinstance(names, list) else []


def listed(block: object, key: str) -> list[Record]:
    """The objects listed under `key`, none where there is no such list."""
    found = block.get(key) if isinstance(block, Mapping) else None
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def mapping(block: object, key: str) -> Record:
    """The object under `key`, empty where there is none."""
    found = block.get(key) if isinstance(block, Mapping) else None
    return found if isinstance(found, dict) else {}


def _read_metrics(path: Path) -> list[Record]:
    if not path.is_file():
        raise InputError(
            f"the run folder has no {METRICS}",
            field=str(path.parent),
            fix="it appears with the first round; give the folder that `nestling run` wrote",
        )
    data = _bytes(path)
    lines = data.split(b"\n")
    rounds: dict[int, Record] = {}
    for count, line in enumerate(lines, start=1):
        # Only a line that its newline has not reached yet can be half-written.
        unfinished = count == len(lines)
        if not line.strip():
            continue
        try:
            record = parsed(line.decode())
        except (ValueError, RecursionError) as error:
            if unfinished:
                continue
            raise InputError(
                f"not valid JSON: {_why(error)}",
                field=f"{path}, line {count}",
                fix="remove the line or restore the file",
            ) from error
        if not isinstance(record, dict) or number(record.get("round")) is None:
            raise InputError(
                'not a record of a round: needs an object with a number under "round"',
                field=f"{path}, line {count}",
            )
        # A resumed run may write a round a second time: the later record is the one that counts.
        rounds[int(record["round"])] = record
    return [rounds[key] for key in sorted(rounds)]


def _object(path: Path) -> Record:
    if not path.is_file():
        return {}
    try:
        found = parsed(_bytes(path).decode())
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(
            f"not valid JSON: {_why(error)}",
            field=f"{path}{line}",
            fix="restore or remove the file",
        ) from error
    if found is not None and not isinstance(found, dict):
        raise InputError("not a JSON object", field=str(path), fix="restore or remove the file")
    return found or {}


def _text(path: Path) -> str:
    return _bytes(path).decode(errors="replace") if path.is_file() else ""


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", field=str(path)) from error


def _why(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _last_round(run: Run) -> int:
    return int(run.metrics[-1]["round"]) if run.metrics else 0


def _identity(run: Run) -> Record:
    """What configuration and federation tell about a run that has no summary yet."""
    found: Record = {}
    for key in ("method", "data", "model"):
        value = run.config.get(key)
        value = value.get("name") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            found[key] = value
    if task := mapping(run.federation, "task"):
        found["task"] = task
    for key in ("seed", "rounds"):
        if number(run.config.get(key)) is not None:
            found[key] = run.config[key]
    for key, part, what in (("model", "model", "name"), ("title", "method", "title")):
        told = mapping(run.federation, part).get(what)
        if isinstance(told, str) and told:
            found.setdefault(key, told)
    return found
