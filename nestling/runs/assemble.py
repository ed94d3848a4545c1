"""From an experiment to a federation that is ready to play: data, split, networks, fleet, plans,
method, engine."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nestling.attacks import flipped
from nestling.data import Dataset, Split, make_split, take_public
from nestling.devices import DEFAULT_TIERS, Budget, FleetConfig, Tier, make_fleet
from nestling.devices.fit import exceeded
from nestling.engines import choose_where, make_engine
from nestling.errors import InputError
from nestling.experiment import Experiment, Named, fleet_of
from nestling.methods import Method
from nestling.models import MODELS, build
from nestling.models.one_output import pick_output
from nestling.runs import fingerprint
from nestling.runs.evaluation import Bench, panel
from nestling.runs.federation import Federation
from nestling.schema import require
from nestling.seeds import stream, torch_seeded
from nestling.store import ClientStore
from nestling.tasks.own_metric import own_metrics
from nestling.training.client import Site
from nestling.views import Reference
from nestling.world import Piece, World, budget_of, piece_cost, plan_tiers, while_free

DEFAULT_FLEET_SIZE = 20


@dataclass(frozen=True)
class Given:
    """Data that somebody brings instead of the experiment's own: the rows, the public inputs, and
    whose the rows are."""

    dataset: Dataset
    public: Tensor | None
    split: Split


def assemble(
    experiment: Experiment, store: ClientStore | None = None
) -> tuple[Experiment, Federation]:
    """The experiment with all it left open settled, and its federation (the engine not yet
    opened)."""
    settled, dataset, world = make_world(experiment, store)
    method = settled.make_method()
    method.setup(world)
    federation = _federation(settled, dataset, world, method)
    if settled.attack.on:
        federation.notes.append(settled.attack.note(federation.attackers, len(world.fleet)))
    if method.robust:
        promise = method.robust.promise(federation.participants)
        federation.notes.append(f"server.merge = {method.robust.rule}: {promise}")
    federation.notes += [
        f"tier {tier.name!r} takes no part: its share of {len(world.fleet)} devices comes to none"
        for tier in fleet_of(experiment.fleet).tiers
        if tier.name not in world.plans
    ]
    return settled, federation


def make_world(
    experiment: Experiment, store: ClientStore | None = None, given: Given | None = None
) -> tuple[Experiment, Dataset, World]:
    """The experiment with all it left open settled, its data, and what a method may know of the
    federation."""
    experiment.split.check()
    whole = given.dataset if given else _data(experiment)
    dataset, public = (
        (whole, None) if given else take_public(whole, experiment.split.public, experiment.seed)
    )
    where = choose_where(
        experiment.engine.name, experiment.engine.device, experiment.engine.precision
    )
    place = where.device
    experiment = _settle_method(_settle_model(experiment, dataset), dataset)
    main = _main_network(experiment, dataset)
    experiment = _settle_networks(_settle_fleet(experiment, dataset, main), dataset)
    fleet = make_fleet(experiment.fleet, experiment.seed)
    split = given.split if given else _split(experiment, dataset, len(fleet))
    references = {main.name: main, **_own_networks(experiment, dataset)}
    plans = plan_tiers(fleet, references, main, _budget(experiment, dataset))
    # of a device's own rows nobody else needs to know, and its networks are the server's
    made = {} if given else _fingerprint(whole, split, references)
    for reference in references.values():
        reference.to(place)
    world = World(
        references,
        main,
        fleet,
        split,
        plans,
        dataset.classes,
        experiment.train.over(experiment.rounds),
        experiment.seed,
    )
    world.task, world.class_names = dataset.learned, dataset.class_names
    world.kind_names = dataset.strata_names
    if world.task.has_classes and not world.class_names:
        world.class_names = tuple(map(str, range(dataset.classes)))
    if given is not None:
        world.public = given.public
    elif public is not None:
        world.public, world.public_labels = public.x.to(place), public.y.to(place)
    world.store, world.rounds, world.where = store or ClientStore(), experiment.rounds, where
    world.fingerprint = made
    return experiment, dataset, world


def _data(experiment: Experiment) -> Dataset:
    """The data as they are read: which rows are the test's does not depend on the seed, or runs of
    two seeds would be measured on different rows."""
    if experiment.data.named_client and experiment.split.kind != "natural":
        raise InputError(
            f"data.client names whose a row is, and {experiment.split.kind!r} divides rows anew",
            field="split.kind",
            fix='set it to "natural", or leave data.client out',
        )
    return experiment.data.load()


def _fingerprint(whole: Dataset, split: Split, references: dict[str, Reference]) -> dict[str, Any]:
    return {
        "data": fingerprint.of_data(whole),
        "split": fingerprint.of_split(split),
        "network": fingerprint.of_networks(references.values()),
    }


def _split(experiment: Experiment, dataset: Dataset, clients: int) -> Split:
    kinds = dataset.strata[0].numpy()
    classes = dataset.classes if dataset.kinds is None else _kinds(dataset)
    return make_split(
        experiment.split,
        y=kinds,
        classes=classes,
        clients=clients,
        seed=experiment.seed,
        client=dataset.client,
    )


def _kinds(dataset: Dataset) -> int:
    """How many kinds of rows there are, in training and test."""
    return 1 + max(int(part.max()) for part in dataset.strata)


def site_of(federation: Federation) -> Site:
    """What the client side needs of a federation."""
    world, bench = federation.world, federation.bench
    x, y, split = bench.x, bench.y, world.split
    if federation.attack.kind == "labels":
        x, y, split = flipped(x, y, split, federation.attackers, world.classes)
    return Site(
        x,
        y,
        split,
        world.references,
        world.classes,
        world.train,
        world.seed,
        world.public,
        world.where,
    )


def default_model(shape: tuple[int, ...]) -> str:
    """The network that suits inputs of a shape, unless the user names one."""
    return {3: "tinycnn", 2: "cnn1d"}.get(len(shape), "mlp")


def reference_network(
    name: str,
    options: dict[str, object],
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    role: str,
) -> Reference:
    """A network by name, with the weights that the seed gives it."""
    kind = (
        (name, json.dumps(options, sort_keys=True, default=repr), shape, classes)
        if name in MODELS
        else None
    )
    with torch_seeded(seed, "network", role):
        return Reference(role, build(name, shape=shape, classes=classes, **options), shape, kind)


def _settle_method(experiment: Experiment, dataset: Dataset) -> Experiment:
    """The experiment with its method set for what is learned; refused where it cannot be."""
    method = experiment.make_method()
    changes = method.settings_for(dataset.learned)
    if not dataset.learned.has_classes:
        experiment.attack.check_task(dataset.learned.name)
    if not changes:
        return experiment
    if experiment.own_method is not None:
        return experiment.with_changes(method=replace(method, **changes))  # type: ignore[type-var]
    named = experiment.method
    return experiment.with_changes(method=Named(named.name, {**named.options, **changes}))


def _settle_model(experiment: Experiment, dataset: Dataset) -> Experiment:
    if experiment.model.name:
        return experiment
    suited = dataset.learned.network
    if not (dataset.x.is_floating_point() or suited):
        raise InputError(
            f"{dataset.name} holds token ids, and no network is named that takes them",
            field="model.name",
            fix="name one that begins with an embedding (lstm with words), or set data.layout",
        )
    wanted = experiment.make_method().as_set.model if len(dataset.shape) == 3 else ""
    name = suited or wanted or default_model(dataset.shape)
    return experiment.with_changes(model=Named(name, experiment.model.options))


def _main_network(experiment: Experiment, dataset: Dataset) -> Reference:
    if experiment.own_model is not None:
        _take_one_output(experiment.own_model, dataset)
        main = Reference("main", experiment.own_model, dataset.shape)
    else:
        model = experiment.model
        main = reference_network(
            model.name, model.options, dataset.shape, dataset.classes, experiment.seed, "main"
        )
        _take_one_output(main.module, dataset)
    _check_outputs(main.module, dataset)
    return main


def _take_one_output(module: nn.Module, dataset: Dataset) -> None:
    """Makes a network that gives a dict or a tuple give the output that is asked of it; whatever
    else is wrong with it is found later. Its layers stay in the mode that they are in."""
    said, modes = None, {layer: layer.training for layer in module.modules()}
    with torch.no_grad(), suppress(Exception):
        said = module.eval()(dataset.x[:2])
    for layer, training in modes.items():
        layer.training = training
    pick_output(module, said, dataset.learned.shape(dataset.y[:2], dataset.classes))


def _check_outputs(module: nn.Module, dataset: Dataset) -> None:
    module.eval()
    with torch.no_grad():
        try:
            out = module(dataset.x[:2])
        except Exception as error:
            raise InputError(
                f"the network does not run on {dataset.name}: {error}", field="model.name"
            ) from error
    wanted = dataset.learned.shape(dataset.y[:2], dataset.classes)
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != wanted:
        got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        said = ", ".join(map(str, wanted[1:]))
        what = "logits" if dataset.learned.has_classes else f"outputs for {dataset.learned.name}"
        raise InputError(
            f"the network must give {what} of shape (batch, {said}), not {got}",
            field="model.name",
        )


def _settle_fleet(experiment: Experiment, dataset: Dataset, main: Reference) -> Experiment:
    fleet = fleet_of(experiment.fleet)
    natural = (
        int(dataset.client.max()) + 1
        if experiment.split.kind == "natural" and dataset.client is not None
        else 0
    )
    size = fleet.size or sum(tier.count for tier in fleet.tiers) or natural or DEFAULT_FLEET_SIZE
    fleet = replace(
        fleet,
        path="",
        size=size,
        tiers=fleet.tiers or _default_tiers(experiment, dataset, main, size),
    )
    fix = "at most the fleet's size, or 0 for everyone"
    require(
        experiment.participants <= size,
        f"{experiment.participants} clients a round from a fleet of {size}",
        "participants",
        fix,
    )
    return experiment.with_changes(fleet=_without_empty(fleet, experiment.seed))


def _without_empty(fleet: FleetConfig, seed: int) -> FleetConfig:
    """The fleet without tiers whose share comes to no device: nobody is there to train, so what
    they could train must not count."""
    made = make_fleet(fleet, seed)
    if all(made.counts):
        return fleet
    left = [
        replace(t, share=0.0, count=count)
        for t, count in zip(made.tiers, made.counts, strict=True)
        if count
    ]
    return replace(fleet, tiers=tuple(left))


def _default_tiers(
    experiment: Experiment, dataset: Dataset, main: Reference, size: int
) -> tuple[Tier, ...]:
    """The default tiers that can train some piece of the network on this data."""
    budget = _budget(experiment.with_changes(fleet=FleetConfig(size=size)), dataset)
    possible = []
    for tier in DEFAULT_TIERS:
        alone = make_fleet(FleetConfig(size=1, tiers=(replace(tier, share=1.0),)), experiment.seed)
        try:
            plan_tiers(alone, {}, main, budget)
            possible.append(tier)
        except InputError:
            continue
    total = sum(tier.share for tier in possible)
    return tuple(replace(tier, share=tier.share / total) for tier in possible)


def _settle_networks(experiment: Experiment, dataset: Dataset) -> Experiment:
    """The experiment in which every tier that names only a device has the largest network of the
    fleet's list that fits it."""
    listed = experiment.fleet.networks
    if not listed:
        return experiment
    profiles = make_fleet(experiment.fleet, experiment.seed).profiles
    budget = _budget(experiment, dataset)
    built = [(n, _listed_network(n, k, dataset, experiment.seed)) for k, n in enumerate(listed)]
    built.sort(key=lambda pair: -piece_cost(Piece(pair[1], pair[1].full)).params)
    tiers = []
    for number, (tier, profile) in enumerate(zip(experiment.fleet.tiers, profiles, strict=True)):
        if tier.device and not tier.model and not tier.ratio:
            limits = while_free(tier, budget_of(tier, budget))
            found = next(
                (
                    n
                    for n, r in built
                    if not exceeded(profile, piece_cost(Piece(r, r.full)), limits)
                ),
                None,
            )
            if found is None:
                raise InputError(
                    f"none of the fleet's networks trains on {profile.name}",
                    field=f"fleet.tiers[{number}] ({tier.name})",
                    fix="list a smaller network in fleet.networks",
                )
            options = {key: value for key, value in found.items() if key != "name"}
            tier = replace(tier, model=found["name"], model_options=options)
        tiers.append(tier)
    return experiment.with_changes(fleet=replace(experiment.fleet, tiers=tuple(tiers), networks=()))


def _listed_network(table: dict[str, Any], number: int, dataset: Dataset, seed: int) -> Reference:
    options = {key: value for key, value in table.items() if key != "name"}
    try:
        return reference_network(
            table["name"], options, dataset.shape, dataset.classes, seed, f"listed {number}"
        )
    except InputError as error:
        raise InputError(str(error), field=f"fleet.networks[{number}]") from None


def _budget(experiment: Experiment, dataset: Dataset) -> Budget:
    train = experiment.train
    optimizer = "adam" if train.optimizer != "sgd" else "momentum" if train.momentum else "sgd"
    samples = experiment.split.size or max(1, len(dataset.y) // experiment.fleet.size)
    blocks = experiment.make_method().blocks
    if dataset.y.is_floating_point() and "target" not in blocks:
        blocks = (*blocks, "target")  # a board loads a row's values beside the row
    return Budget(
        train.batch, samples, train.epochs, optimizer, experiment.time_budget, blocks=blocks
    )


def _own_networks(experiment: Experiment, dataset: Dataset) -> dict[str, Reference]:
    """The networks that tiers bring themselves, one for each tier."""
    own = {}
    for number, tier in enumerate(experiment.fleet.tiers):
        if tier.model:
            try:
                found = reference_network(
                    tier.model,
                    tier.model_options,
                    dataset.shape,
                    dataset.classes,
                    experiment.seed,
                    tier.name,
                )
            except InputError as error:
                raise InputError(str(error), field=f"fleet.tiers[{number}].model") from None
            _take_one_output(found.module, dataset)
            own[tier.name] = found
    return own


def _federation(
    experiment: Experiment, dataset: Dataset, world: World, method: Method
) -> Federation:
    participants, place = experiment.participants or len(world.fleet), world.where.device
    order = torch.from_numpy(stream(experiment.seed, "calibration").permutation(len(dataset.y)))
    bench = Bench(
        dataset.x_test.to(place),
        dataset.y_test.to(place),
        dataset.x.to(place),
        dataset.y.to(place),
        experiment.evaluate.batch,
        order[: experiment.evaluate.calibration or len(order)].to(place),
        panel(world, experiment.evaluate.clients),
        own_metrics(experiment.evaluate.metrics, experiment.evaluate.own),
        None if dataset.kinds is None else dataset.strata[1].to(place),
    )
    chosen = experiment.engine
    engine = make_engine(
        chosen.name,
        chosen.workers,
        experiment.rounds * participants,
        _portable(experiment),
        world.where,
        chosen.compile,
        chosen.address,
    )
    if any(tier.board for tier in world.fleet.tiers):
        from nestling.engines.boards import check_boards, with_boards  # an extra

        check_boards(world.fleet, world.plans, dataset.y)
        home = world.store.folder.parent / "boards" if world.store.folder else None
        engine = with_boards(engine, world.fleet, verify=chosen.verify_boards, home=home)
    return Federation(
        world,
        method,
        engine,
        bench,
        experiment.rounds,
        participants,
        experiment.evaluate.every,
        experiment.server,
        experiment.attack,
        reading=_reading(dataset, experiment.split.kind),
    )


def _reading(dataset: Dataset, kind: str) -> dict[str, Any]:
    """What was read; of rows that nobody read, how many there are."""
    if dataset.reading is not None:
        return dataset.reading.table(kind)
    return {"line": f"data {dataset.name}: {len(dataset.y):,} rows as they were given"}


def _portable(experiment: Experiment) -> bool:
    """Whether another process can import the method and the networks: what a script defines itself
    stays with it."""
    own = (experiment.own_method, experiment.own_model)
    return not any(type(o).__module__ == "__main__" for o in own if o is not None)
