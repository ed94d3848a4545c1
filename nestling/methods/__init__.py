"""The methods: one file each, and the one table of their names."""

from __future__ import annotations

import importlib

from nestling.errors import unknown
from nestling.methods.info import Info
from nestling.methods.method import Method, Reply, SharedWeights
from nestling.named_code import named_module

METHODS: dict[str, str] = {
    "all-large": "nestling.methods.baselines.all_large:AllLarge",
    "decoupled": "nestling.methods.baselines.decoupled:Decoupled",
    "depthfl": "nestling.methods.submodel.depthfl:DepthFL",
    "distreal": "nestling.methods.submodel.distreal:Distreal",
    "draftfed": "nestling.methods.distill.draftfed:DraftFed",
    "fd": "nestling.methods.distill.fd:FD",
    "fedavg": "nestling.methods.baselines.fedavg:FedAvg",
    "fedcma": "nestling.methods.representation.fedcma:FedCMA",
    "feddf": "nestling.methods.distill.feddf:FedDF",
    "fedet": "nestling.methods.distill.fedet:FedET",
    "fedftg": "nestling.methods.distill.fedftg:FedFTG",
    "fedgen": "nestling.methods.distill.fedgen:FedGen",
    "fedgh": "nestling.methods.representation.fedgh:FedGH",
    "fedhenn": "nestling.methods.representation.fedhenn:FedHeNN",
    "fedhkd": "nestling.methods.distill.fedhkd:FedHKD",
    "fedhm": "nestling.methods.lowrank.fedhm:FedHM",
    "fedin": "nestling.methods.representation.fedin:FedIN",
    "fedkd": "nestling.methods.distill.fedkd:FedKD",
    "fedmd": "nestling.methods.distill.fedmd:FedMD",
    "fednova": "nestling.methods.baselines.fednova:FedNova",
    "fedper": "nestling.methods.baselines.fedper:FedPer",
    "fedproto": "nestling.methods.representation.fedproto:FedProto",
    "fedprox": "nestling.methods.baselines.fedprox:FedProx",
    "fedrolex": "nestling.methods.submodel.fedrolex:FedRolex",
    "fedtgp": "nestling.methods.representation.fedtgp:FedTGP",
    "fedzkt": "nestling.methods.distill.fedzkt:FedZKT",
    "fjord": "nestling.methods.submodel.fjord:FjORD",
    "flexfl": "nestling.methods.submodel.flexfl:FlexFL",
    "fml": "nestling.methods.distill.fml:FML",
    "hafl-ghn": "nestling.methods.lowrank.haflghn:HAFLGHN",
    "hermes": "nestling.methods.sparse.hermes:Hermes",
    "heteroavg": "nestling.methods.baselines.averaged:Averaged",
    "heterofl": "nestling.methods.submodel.heterofl:HeteroFL",
    "inclusivefl": "nestling.methods.submodel.inclusivefl:InclusiveFL",
    "incoavg": "nestling.methods.submodel.incoavg:InCoAvg",
    "kt-pfl": "nestling.methods.distill.ktpfl:KTpFL",
    "lg-fedavg": "nestling.methods.representation.lgfedavg:LGFedAvg",
    "local": "nestling.methods.baselines.local:Local",
    "lotteryfl": "nestling.methods.sparse.lotteryfl:LotteryFL",
    "moon": "nestling.methods.baselines.moon:Moon",
    "prism": "nestling.methods.lowrank.prism:PriSM",
    "prunefl": "nestling.methods.sparse.prunefl:PruneFL",
    "scaffold": "nestling.methods.baselines.scaffold:Scaffold",
    "scalefl": "nestling.methods.submodel.scalefl:ScaleFL",
    "shared-average": "nestling.methods.submodel.shared_average:SharedAverage",
    "shared-distill": "nestling.methods.distill.shared_distill:SharedDistill",
}
"""Name → where it lives."""

ALIASES: dict[str, str] = {
    "depth-fl": "depthfl",
    "draft-fed": "draftfed",
    "fed-avg": "fedavg",
    "fed-cma": "fedcma",
    "fed-df": "feddf",
    "fed-et": "fedet",
    "fed-ftg": "fedftg",
    "fed-gen": "fedgen",
    "fed-gh": "fedgh",
    "fed-henn": "fedhenn",
    "fed-hkd": "fedhkd",
    "fed-hm": "fedhm",
    "fed-in": "fedin",
    "fed-kd": "fedkd",
    "fed-md": "fedmd",
    "fed-nova": "fednova",
    "fed-per": "fedper",
    "fed-proto": "fedproto",
    "fed-prox": "fedprox",
    "fed-rolex": "fedrolex",
    "fed-tgp": "fedtgp",
    "fed-zkt": "fedzkt",
    "federated-distillation": "fd",
    "federated-mutual-learning": "fml",
    "flex-fl": "flexfl",
    "hafl": "hafl-ghn",
    "haflghn": "hafl-ghn",
    "hetero-fl": "heterofl",
    "inclusive-fl": "inclusivefl",
    "inco": "incoavg",
    "inco-avg": "incoavg",
    "ktpfl": "kt-pfl",
    "lg-fed": "lg-fedavg",
    "lgfedavg": "lg-fedavg",
    "local-only": "local",
    "lottery-fl": "lotteryfl",
    "ordered-dropout": "fjord",
    "prune-fl": "prunefl",
    "scale-fl": "scalefl",
    "standalone": "local",
}
"""Other names that papers and their code have for a method → its name here."""


def method_class(name: str) -> type[Method]:
    """The class of a method by its name or alias, or of a user's own as `package.module:Class`."""
    name = ALIASES.get(name, name)
    if name not in METHODS and ":" not in name:
        raise unknown("method", name, METHODS, field="method.name")
    path = METHODS.get(name, name)
    module, _, attribute = path.partition(":")
    try:
        # What was given as an object is written down by its path: one of ours is known that way too.
        ours = path in METHODS.values()
        home = importlib.import_module(module) if ours else named_module(path, "method.name")
        found = getattr(home, attribute)
    except (ImportError, AttributeError) as error:
        if name in METHODS:
            raise  # it is known, and our fault
        raise unknown("method", name, METHODS, field="method.name") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise unknown("method", name, METHODS, field="method.name")
    return found


__all__ = ["ALIASES", "METHODS", "Info", "Method", "Reply", "SharedWeights", "method_class"]
