"""What was measured beside the score: the numbers of a run, its classes, and what was taken for
what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from nestling.report.fleet_parts import shades_of
from nestling.report.folder import Run, label_names, last_best, mapping
from nestling.report.markup import Cell, Column, fill, section, table
from nestling.report.svg import heat_map
from nestling.report.words import decimal, in_a_sentence, number, percent, plural, whole
from nestling.runfiles import score_word

Row = Mapping[str, Any]
_PICTURED_CLASSES = 100
_WORDS: dict[str, tuple[str, Callable[[object], str]]] = {
    "macro_f1": ("Macro F1", lambda value: percent(value, 2)),
    "test_loss": ("Test loss", decimal),
    "label_accuracy": ("Label accuracy", lambda value: percent(value, 2)),
    "auroc": ("AUROC", lambda value: percent(value, 2)),
    "pauc": ("Partial AUROC, up to 10% false alarms", lambda value: percent(value, 2)),
    "mae": ("Mean absolute error", decimal),
    "rmse": ("Root mean square error", decimal),
    "perplexity": ("Perplexity", decimal),
    "calibration_error": ("Calibration error", lambda value: percent(value, 2)),
    "personal_worst": ("Personal {score}, the worst client", lambda value: percent(value, 2)),
    "personal_tenth": ("Personal {score}, a tenth do not reach", lambda value: percent(value, 2)),
    "personal_variance": ("Personal {score}, variance", decimal),
}


def metric_words(name: str, value: object, score: str) -> tuple[str, str]:
    """A metric's name and value as they are shown, with the word for what ranks models; those of
    the user's own as they are."""
    words, form = _WORDS.get(name, (name, decimal))
    return words.replace("{score}", score), form(value)


def metrics_line(summary: Row) -> str:
    """The last values in one line; nothing where there are none."""
    found, score = mapping(summary, "metrics"), score_word(summary)
    pairs = [metric_words(name, last_best(block)[0], score) for name, block in found.items()]
    return "; ".join(f"{in_a_sentence(words)} {value}" for words, value in pairs)


def metrics_part(run: Run, summary: Row) -> Markup:
    """The section of metrics; nothing of a run that has none."""
    found = mapping(summary, "metrics")
    if not found:
        return Markup("")
    by_class = mapping(summary, "by_class")
    labels, score = label_names(run), score_word(summary)
    lead = (
        "Of the global model, or where there is none of the clients' models together, on the "
        f"common test set; personal {score} over the clients that were tested."
    )
    body = _table(found, score) + _recall(by_class, labels) + _confusion(by_class, labels)
    return section("metrics", "Metrics", lead, body)


def _table(found: Row, score: str) -> Markup:
    columns = [
        Column("Metric", numeric=False),
        Column("last"),
        Column("best"),
        Column("best round"),
    ]
    rows = []
    for name, block in found.items():
        last, best, at = last_best(block)
        words, shown = metric_words(name, last, score)
        rows.append(
            [
                Cell(words),
                Cell(shown, last),
                Cell(metric_words(name, best, score)[1], best),
                Cell(whole(at), at),
            ]
        )
    return table(columns, rows, label="Metrics")


def _recall(by_class: Row, labels: Sequence[str]) -> Markup:
    shares = by_class.get("recall")
    if not isinstance(shares, list) or not shares:
        return Markup("")
    columns = [Column("Class", numeric=False), Column("Recall")]
    rows = [
        [Cell(_label(labels, at)), Cell(percent(share, 2), number(share))]
        for at, share in enumerate(shares)
    ]
    return table(columns, rows, label="Recall by class")


def _confusion(by_class: Row, labels: Sequence[str]) -> Markup:
    counts = by_class.get("confusion")
    if not isinstance(counts, list) or not all(isinstance(row, list) for row in counts):
        return Markup("")
    if not 0 < len(counts) <= _PICTURED_CLASSES or {len(row) for row in counts} != {len(counts)}:
        return Markup("")
    figures = [[number(value) or 0.0 for value in row] for row in counts]
    names = [_label(labels, at) for at in range(len(figures))]
    title = "What rows of a class were taken for"

    def tell(row: int, column: int) -> str:
        taken = "recognised" if row == column else f"taken for {names[column]}"
        return f"class {names[row]} {taken}: {whole(figures[row][column])}"

    image = heat_map(
        figures,
        rows=names,
        columns=names,
        across="taken for",
        tell=tell,
        groups=[],
        title=title,
        desc=f"{plural(len(names), 'class', 'classes')} down, the same across: the stronger a "
        "cell's colour, the more test rows of the one were taken for the other.",
        ident="c-confusion",
    )
    return fill(
        "heat.html",
        title=title,
        said="A row is a class of the test rows, a column what the model took them for; what was "
        "recognised lies on the diagonal.",
        image=image,
        groups=[],
        counted="Test rows",
        shades=shades_of(figures),
    )


def _label(labels: Sequence[str], at: int) -> str:
    return labels[at] if at < len(labels) else str(at)
