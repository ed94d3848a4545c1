"""The whole description of a run: data, split, model, fleet, method, schedule, seed.

One TOML file is one run. Every field has a default; a field that is unknown or wrong is refused
with its path and what is allowed.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
from torch import nn

from nestling.attacks import Attack
from nestling.data import (
    DATASETS,
    Dataset,
    RawRows,
    Recipe,
    SplitConfig,
    digest_of,
    load,
    prepare_given,
    raw_rows,
)
from nestling.data.recipe import LAYOUTS, MISSING, SCALES, TRANSFORMS
from nestling.devices import FleetConfig, Tier, read_fleet
from nestling.engines import DEVICES, ENGINES, PRECISIONS
from nestling.errors import InputError, seen
from nestling.files import parse_toml, read_toml
from nestling.message import TRANSPORTS
from nestling.methods import ALIASES, METHODS, Method, method_class
from nestling.methods.server import Server
from nestling.models import MODELS
from nestling.schema import convert, from_table, one_or_more, require, to_table
from nestling.settings import Bounds, Count, OneOf, Whole, check_settings, take_types
from nestling.tasks import TASKS
from nestling.tasks.own_metric import name_of
from nestling.training.phase import Train

DEFAULT_METHOD = "shared-average"


@dataclass(frozen=True)
class Named:
    """A name and its options: a method or a model. In TOML the options stand beside the name.

    name:    by which it is known.
    options: everything else that can be said of it, each beside the name: a method's own settings
             (`nestling config method.NAME` and its page), a network's options (`nestling config
             model.NAME`).
    """

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)


GIVEN = "given"
"""The name of data that were given as objects."""


@dataclass(frozen=True)
class Data:
    """Which data: a data set by name, a file or folder of the user's, code, or objects (`Data.of`).
    docs/data.md has all of it.

    name:      a public data set, what reads the file or folder at `path` (npz, csv, parquet,
               images, wavs), or code of the user's own; "given" stands for objects.
    path:      the user's file or folder; from a file of settings, also one that lies beside it.
    missing:   what happens to values that are NaN.
    layout:    what the dimensions of a sample are: features, tokens, or channels (c) beside length
               (l) or height and width (h, w); auto goes by type and shape.
    scale:     what is done to values: standard (by the training rows), unit (0 to 1), none; auto
               divides the bytes of pictures by 255 and standardises the rest.
    client:    whose a row is: auto, none, or the name of the array or column; of folders, "folder"
               or "prefix".
    label:     the column of the classes (empty: `label`, `y`, `class` or `target`).
    features:  the columns of the samples (empty: all others).
    test:      the column that marks held-out rows (empty: `test`, where there is one).
    transform: what becomes of a sample before all else; log-mel makes pictures of sounds.
    task:      what is learned of the rows (docs/tasks.md).
    normal:    the classes that are normal; with the task reconstruction all others are anomalies,
               which stand among the test rows only.
    horizon:   how many last steps of a sequence are foretold, with the task forecast.
    options:   further settings of the reader, of the transform, or of the user's callable.
    digest:    of rows that were given as objects, by which a resumed run knows them; never set by
               hand.
    """

    name: Annotated[str, OneOf(DATASETS, more="package.module:callable")] = "mnist12k"
    path: str = ""
    missing: Annotated[str, OneOf(MISSING)] = "refuse"
    layout: Annotated[str, OneOf(LAYOUTS)] = "auto"
    scale: Annotated[str, OneOf(SCALES)] = "auto"
    client: str = "auto"
    label: str = ""
    features: tuple[str, ...] = ()
    test: str = ""
    transform: Annotated[str, OneOf(TRANSFORMS)] = "none"
    task: Annotated[str, OneOf(TASKS)] = "classification"
    normal: tuple[str, ...] = ()
    horizon: Annotated[int, Bounds(0, zero="an eighth of them")] = 0
    options: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    own: RawRows | None = field(default=None, init=False, repr=False, compare=False)

    @staticmethod
    def of(
        x: Any,
        y: Any = None,
        *,
        client: Any = None,
        test: Any = None,
        features: str | Sequence[str] = (),
        class_names: Sequence[str] = (),
        **settings: Any,
    ) -> Data:
        """Data from objects: arrays or tensors x and y; a torch `Dataset` of (sample, class) pairs;
        or a Hugging Face `Dataset`, where y, client and features name columns.

        client is whose each row is (used with `split.kind = "natural"`); test marks rows by
        booleans, or is a pair (x, y), or a second `Dataset`. `settings` are layout, scale, missing,
        transform, task, normal, horizon and options.
        """
        rows = raw_rows(x, y, client=client, test=test, features=features, class_names=class_names)
        data = Data(GIVEN, digest=digest_of(rows), **settings)
        object.__setattr__(data, "own", rows)
        return data

    @property
    def named_client(self) -> bool:
        """Whether the user named what holds each row's client."""
        return self.client not in ("auto", "none")

    def load(self, seed: int = 0) -> Dataset:
        """The rows, checked and ready to train on; `seed` draws those to be held out where nothing
        else says which."""
        how = {one.name: getattr(self, one.name) for one in fields(Recipe) if one.name != "seed"}
        if self.name != GIVEN:
            return load(self.name, path=self.path, seed=seed, **how)
        require(not self.path, "rows that are given have no path", "data.path", "leave it out")
        if self.own is None:
            raise InputError(
                "the rows of this run were given as objects, which no file holds",
                field="data",
                fix="give them again: nestling.resume(FOLDER, data=nestling.Data.of(x, y, …)); "
                "the command line needs data in a file",
            )
        return prepare_given(self.name, self.own, Recipe(seed=seed, **how))


@dataclass(frozen=True)
class EngineConfig:
    """Where clients run.

    name:      inline (one client after another), pool (processes), cohort (equal clients as one
               stack), ray (`nestling[ray]`), or auto, which chooses.
    workers:   how many processes pool, cohort on the CPU, and ray have.
    device:    what is computed on; auto takes a GPU where there is one and the engine is auto or
               cohort.
    precision: of the arithmetic on a GPU; a CPU always computes in float32.
    compile:   whether torch.compile fuses the stacked step on a GPU: faster rounds after some ten
               seconds per kind of network.
    address:   the Ray cluster to join (empty: a local one).
    verify_boards: whether every answer of an emulated board is compared, bit for bit, with that of
                   the same C on this machine.
    transport: how float tensors travel to real devices and back: float32 (exact), fp16, or int8
               (one scale per matrix).
    """

    name: Annotated[str, OneOf(ENGINES, "engine")] = "auto"
    workers: Annotated[int, Bounds(0, zero="one per core")] = 0
    device: Annotated[str, OneOf(DEVICES)] = "auto"
    precision: Annotated[str, OneOf(PRECISIONS)] = "float32"
    compile: bool = False
    address: str = ""
    verify_boards: bool = True
    transport: Annotated[str, OneOf(TRANSPORTS)] = "float32"


@dataclass(frozen=True)
class Evaluation:
    """When and how models are tested.

    every:       rounds from one test to the next (the last round is always tested).
    clients:     of how many clients, at most, the personal score is measured.
    batch:       how many rows are tested at once, which matters for norm = "batch" only.
    calibration: how many training rows the statistics of norm = "sbn" are taken from.
    metrics:     the user's own, as "package.module:function" (in Python the functions themselves):
                 of the true and the found classes, and of the logits where they ask for them.
    """

    every: Count = 1
    clients: Count = 50
    batch: Count = 500
    calibration: Annotated[int, Bounds(0, zero="all of them")] = 0
    metrics: tuple[str, ...] = ()
    own: dict[str, Callable[..., Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    if TYPE_CHECKING:

        def __init__(
            self,
            every: int = ...,
            clients: int = ...,
            batch: int = ...,
            calibration: int = ...,
            metrics: Sequence[str | Callable[..., Any]] = ...,
        ) -> None:
            """Takes functions as metrics too."""

    def __post_init__(self) -> None:
        """Notes functions by their names, under which a file knows them."""
        if isinstance(self.metrics, str) or not isinstance(self.metrics, Iterable):
            raise InputError(
                f"expected a list of functions or their names, got {seen(self.metrics)}",
                field="evaluate.metrics",
                fix="write metrics=[...], with one alone too",
            )
        given = tuple(self.metrics)
        names = tuple(name_of(metric) for metric in given)
        known = {n: m for n, m in zip(names, given, strict=True) if not isinstance(m, str)}
        object.__setattr__(self, "metrics", names)
        object.__setattr__(self, "own", known)


@dataclass(frozen=True)
class Experiment:
    """One run. `Experiment()` is the default; `Experiment(method="heterofl", rounds=50)` changes
    what it names.

    In Python method and model may be a name or a `Named`, a `Method` object and an `nn.Module`, and
    every section may be a dict, as a file has it.

    method:       what clients do and how the server merges it (`nestling methods`).
    rounds:       how many rounds are played.
    seed:         what everything random follows from.
    participants: how many clients take part in a round.
    time_budget:  the seconds that a device may compute in a round; what it trains is chosen so.
    data, split:  which rows, and how clients divide them.
    model:        the network (`nestling models`); left out, it follows from the data.
    fleet:        who takes part.
    train:        how clients train.
    server:       what the server does with what it merged.
    attack:       clients that lie.
    engine:       where clients run.
    evaluate:     when and how models are tested.
    """

    method: Annotated[Named, OneOf(METHODS, more="package.module:Class")] = field(
        default_factory=lambda: Named(DEFAULT_METHOD)
    )
    rounds: Count = 30
    seed: Whole = 0
    participants: Annotated[int, Bounds(0, zero="every client")] = 10
    time_budget: Annotated[float, Bounds(0, zero="no limit")] = 0.0
    data: Data = field(default_factory=Data)
    split: SplitConfig = field(default_factory=SplitConfig)
    model: Annotated[Named, OneOf(MODELS, more="package.module:callable")] = field(
        default_factory=Named
    )
    fleet: FleetConfig = field(default_factory=FleetConfig)
    train: Train = field(default_factory=Train)
    server: Server = field(default_factory=Server)
    attack: Attack = field(default_factory=Attack)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluate: Evaluation = field(default_factory=Evaluation)
    own_method: Method | None = field(default=None, init=False, repr=False, compare=False)
    own_model: nn.Module | None = field(default=None, init=False, repr=False, compare=False)

    if TYPE_CHECKING:  # what callers may write: a field is what `_take_shorthand` makes of it

        def __init__(
            self,
            method: str | Named | Method | Mapping[str, Any] = ...,
            rounds: int = ...,
            seed: int = ...,
            participants: int = ...,
            time_budget: float = ...,
            data: str | Data | Mapping[str, Any] = ...,
            split: SplitConfig | Mapping[str, Any] = ...,
            model: str | Named | nn.Module | Mapping[str, Any] = ...,
            fleet: str | Path | FleetConfig | Sequence[Tier] | Mapping[str, Any] = ...,
            train: Train | Mapping[str, Any] = ...,
            server: Server | Mapping[str, Any] = ...,
            attack: Attack | Mapping[str, Any] = ...,
            engine: EngineConfig | Mapping[str, Any] = ...,
            evaluate: Evaluation | Mapping[str, Any] = ...,
        ) -> None:
            """Takes any of the fields, some of them in a shorter form."""

    def __post_init__(self) -> None:
        """Expands shorthand and refuses what is of another type or out of range, and settings of
        the server or of an attack that do not suit the method."""
        self._take_shorthand()
        check_settings(self, "")
        for section in _SECTIONS:
            # the numbers of a fleet are checked with those of its file
            check = take_types if section == "fleet" else check_settings
            check(getattr(self, section), section)
        for index, tier in enumerate(self.fleet.tiers):
            take_types(tier, f"fleet.tiers[{index}]")
        self.train.over(self.rounds)  # refuses a warm-up as long as the run
        method = self.make_method()
        self.server.check(method)
        self.attack.check(
            method.as_set.title, [part.name for part in method.travelling() if part.up]
        )

    def _take_shorthand(self) -> None:
        """Lets callers write method="heterofl", method=MyMethod(), model=my_module, data="mnist",
        fleet=(Tier(...), ...)."""
        for name, kind in _OBJECTS.items():
            given = getattr(self, name)
            if isinstance(given, kind):
                object.__setattr__(self, f"own_{name}", given)
            object.__setattr__(self, name, _named_in(name, given))
        for name in _SECTIONS:
            object.__setattr__(self, name, _section_in(name, getattr(self, name)))

    def make_method(self) -> Method:
        """A fresh method object with the experiment's settings."""
        if self.own_method is not None:
            return dataclasses.replace(self.own_method)  # type: ignore[type-var]
        return from_table(method_class(self.method.name), self.method.options, "method")

    def named_code(self) -> frozenset[str]:
        """The names of code of the user's own, "package.module:callable", wherever they stand."""
        fleet = fleet_of(self.fleet)
        names = [self.method.name, self.model.name, self.data.name, *self.evaluate.metrics]
        names += [tier.model for tier in fleet.tiers] + [str(n["name"]) for n in fleet.networks]
        return frozenset(name for name in names if ":" in name)

    # -- TOML --------------------------------------------------------------------------------------

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> Experiment:
        """An experiment from nested tables, as TOML gives them."""
        plain = {key: value for key, value in table.items() if key not in ("method", "model")}
        for key in ("method", "model"):
            if key in table:
                plain[key] = _named(table[key], key)
        return from_table(Experiment, plain)

    @staticmethod
    def read(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Experiment:
        """An experiment from a TOML file (None: the defaults) and `key.path=value` overrides."""
        table = read_toml(path) if path is not None else {}
        return Experiment.from_parts(table, overrides, Path(path).parent if path else None)

    @staticmethod
    def from_parts(
        table: Mapping[str, Any], overrides: Iterable[str] = (), folder: Path | None = None
    ) -> Experiment:
        """An experiment from the tables of a file, which lies in `folder`, and `key.path=value`
        overrides."""
        changed = overridden(table, overrides)
        if "sweep" in changed:
            raise InputError(
                "the file describes a sweep, not one run",
                field="sweep",
                fix="play it with nestling sweep FILE, or leave the table out",
            )
        if folder is not None:
            _paths_beside(folder, changed)
        return Experiment.from_table(changed)

    def to_table(self) -> dict[str, Any]:
        """The inverse of `from_table`: complete, with every default written out."""
        table = to_table(self)
        for key in ("method", "model"):
            table[key] = {"name": table[key]["name"], **table[key]["options"]}
        return table

    def to_toml(self) -> str:
        """The experiment as a TOML file that reads back equal."""
        return tomli_w.dumps(self.to_table())

    def with_changes(self, **changes: Any) -> Experiment:
        """A copy with other top-level fields; a method or model given as an object stays."""
        copy = dataclasses.replace(self, **changes)
        for name, replaced in (("own_method", "method"), ("own_model", "model")):
            if replaced not in changes:
                object.__setattr__(copy, name, getattr(self, name))
        return copy

    def with_objects_of(self, other: Experiment | None) -> Experiment:
        """A copy with the method and the network that another was given as objects, where it was
        given any."""
        copy = self.with_changes()
        for name, kind in (("own_method", "method"), ("own_model", "model")):
            if (
                other is not None
                and getattr(other, name) is not None
                and getattr(other, kind).name == getattr(self, kind).name
            ):
                object.__setattr__(copy, name, getattr(other, name))
        if other is not None and other.data.own is not None and other.data == self.data:
            object.__setattr__(copy, "data", other.data)
        return copy

    def with_data(self, data: Data | None) -> Experiment:
        """A copy with rows that are given again as objects; others than those of the experiment are
        refused."""
        if data is None:
            return self
        if not isinstance(data, Data):
            raise InputError(
                f"expected rows, got {seen(data)}", field="data", fix="write data=Data.of(x, y)"
            )
        if self.data.name != GIVEN:
            raise InputError(
                f"the run reads {self.data.name!r} itself", field="data", fix="leave data= out"
            )
        if data != self.data:
            what = "rows" if data.digest != self.data.digest else "settings of data"
            raise InputError(
                f"these are other {what} than those the run began with",
                field="data",
                fix="give the same to Data.of, or start another run",
            )
        return self.with_changes(data=data)


def experiment_of(given: object) -> Experiment:
    """The experiment that a caller gave; None stands for the default one."""
    if given is None:
        return Experiment()
    if isinstance(given, Experiment):
        return given
    is_file = isinstance(given, os.PathLike) or str(given).endswith(".toml")
    if is_file:
        fix = f"read it: nestling.Experiment.read({str(given)!r})"
    else:
        name = repr(given) if isinstance(given, str) else "..."
        fix = f"write nestling.Experiment(method={name})"
    raise InputError(
        f"expected a nestling.Experiment, got {seen(given)}", field="experiment", fix=fix
    )


def fleet_of(config: FleetConfig) -> FleetConfig:
    """The fleet with its file, if it names one, read in, and the devices of its boards named: the
    run folder then holds the whole description."""
    if config.path:
        require(
            not config.tiers,
            "a fleet file and tiers are both given",
            "fleet.path",
            "keep one of them",
        )
        config = read_fleet(config.path, config)
    if not any(tier.board for tier in config.tiers):
        return config
    from nestling.tiny.lab import with_devices  # an extra

    return with_devices(config)


_OBJECTS: dict[str, type] = {"method": Method, "model": nn.Module}
_SECTIONS: dict[str, type] = {
    "data": Data,
    "split": SplitConfig,
    "fleet": FleetConfig,
    "train": Train,
    "server": Server,
    "attack": Attack,
    "engine": EngineConfig,
    "evaluate": Evaluation,
}
_WANTED = {
    "method": "a name, a Named or a Method object",
    "model": "a name, a Named or an nn.Module",
    "data": "a name, a Data or Data.of(x, y)",
    "fleet": "a file's path, a FleetConfig or a list of Tiers",
}
"""What callers may give for a field in more than one form, as errors say it."""


def _named_in(name: str, given: Any) -> Named:
    """What stands in a file for the method or the model that a caller gave."""
    if isinstance(given, _OBJECTS[name]):
        kind = type(given)
        options = to_table(given) if name == "method" else {}
        return Named(f"{kind.__module__}:{kind.__qualname__}", options)
    if not isinstance(given, (str, Named, Mapping)):
        is_class = isinstance(given, type)
        raise InputError(
            f"expected {_WANTED[name]}, got {'a class' if is_class else seen(given)}",
            field=name,
            fix=f"make an object of it: {given.__name__}(...)"
            if is_class
            else f"`nestling {name}s` lists the names",
        )
    named = given if isinstance(given, Named) else _named(given, name)
    take_types(named, name)
    if name == "method" and named.name in ALIASES:
        return Named(ALIASES[named.name], named.options)
    return named


def _section_in(name: str, given: Any) -> Any:
    """The section that a caller gave, or still a dict of its fields."""
    kind = _SECTIONS[name]
    if isinstance(given, (kind, Mapping)):
        return given
    if name == "data" and isinstance(given, str):
        return Data(given)
    if name == "fleet" and isinstance(given, (str, Path)):
        return FleetConfig(path=str(given))
    if name == "fleet" and isinstance(given, (list, tuple)):
        return FleetConfig(tiers=tuple(given))
    # a section whose first field is a text goes by it: split by its kind, engine by its name
    first = fields(kind)[0]
    goes_by = isinstance(given, str) and isinstance(first.default, str)
    inside = f"{first.name}={given!r}" if goes_by else "..."
    write = "Data.of(x, y)" if name == "data" else f"{kind.__name__}({inside})"
    article = "an" if kind.__name__[0] in "AE" else "a"
    raise InputError(
        f"expected {_WANTED.get(name, f'{article} {kind.__name__}')}, got {seen(given)}",
        field=name,
        fix=f"write {name}=nestling.{write}",
    )


def _named(value: Any, key: str) -> Named:
    if isinstance(value, str):
        return Named(value)
    if not isinstance(value, Mapping):
        raise InputError(f"expected a name or a table, got {value!r}", field=key)
    name = convert(str, value.get("name", DEFAULT_METHOD if key == "method" else ""), f"{key}.name")
    return Named(name, {k: v for k, v in value.items() if k != "name"})


def overridden(table: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The tables of an experiment with `key.path=value` overrides."""
    changed = copy.deepcopy(dict(table))
    for override in one_or_more(overrides, "overrides"):
        _override(changed, override)
    return changed


def _override(table: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise InputError(
            f"cannot read the override {text!r}",
            field="--set",
            fix="write key.path=value, e.g. split.alpha=0.3",
        )
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        # `method = "heterofl"` is short for a table with a name.
        table[part] = inner = {"name": inner} if isinstance(inner, str) else inner
        if not isinstance(inner, dict):
            raise InputError(f"{part!r} is not a table", field=key)
        table = inner
    table[path[-1]] = value_of(value.strip())


def value_of(text: str) -> Any:
    """A TOML value, or plain text where it is none."""
    try:
        return parse_toml(f"value = {text}", "--set")["value"]
    except InputError:
        return text


def _paths_beside(folder: Path, table: dict[str, Any]) -> None:
    """Paths in a file are relative to that file, unless they exist from where the user stands."""
    for section in ("data", "fleet"):
        inner = table.get(section)
        if isinstance(inner, dict) and isinstance(path := inner.get("path"), str) and path:
            beside = folder / path
            # os.path, for which a name that no file can have is that of no file
            if not os.path.exists(path) and os.path.exists(beside):
                inner["path"] = str(beside)


__all__ = [
    "Attack",
    "Data",
    "EngineConfig",
    "Evaluation",
    "Experiment",
    "FleetConfig",
    "Named",
    "Server",
    "SplitConfig",
    "Tier",
    "Train",
    "experiment_of",
    "fleet_of",
    "overridden",
    "value_of",
]
