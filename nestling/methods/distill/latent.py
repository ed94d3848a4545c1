"""Features that a generator makes: what classifiers say of them, and what either teaches the other (FedGen)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.methods.api import Client, Message, Reply, State, Tensors, pack
from nestling.methods.heads import columns_of, head_of
from nestling.models.generators import diversity
from nestling.models.latent_generator import generated
from nestling.seeds import derive
from nestling.tasks import losses
from nestling.training.distiller import Student
from nestling.training.noise import uniform
from nestling.training.objectives import Batch, Given, Net, distillation
from nestling.training.recorder import Recorder


@dataclass(frozen=True)
class Classifier:
    """A client's last layer, and which of the generated features it reads (None: all)."""

    head: Tensors
    columns: Tensor | None = None

    @staticmethod
    def of(reply: Reply) -> Classifier:
        """The classifier of a reply, which comes alone or with the rest of its network."""
        if "head" in reply.message:
            return Classifier(reply.message["head"])
        reference, head = reply.piece.reference, reply.piece.reference.taps.head
        return Classifier(head_of(reply.message["weights"], head), columns_of(reference, reply.piece.view, head))

    def kept(self, work: Recorder, number: int) -> Classifier:
        """The same, of the `number`-th client, where recorded work can read it."""
        columns = {} if self.columns is None else {"columns": self.columns}
        found = work.keep(("classifier", number), {**self.head, **columns})
        return Classifier({name: found[name] for name in self.head}, found.get("columns"))

    def __call__(self, z: Tensor) -> Tensor:
        """Its logits."""
        return F.linear(z if self.columns is None else z[:, self.columns], self.head["weight"], self.head.get("bias"))


def mean_classifier(heads: Sequence[Tensors], samples: Sequence[int]) -> State:
    """The mean of some classifiers by n_k."""
    share = torch.tensor(samples, dtype=torch.float64) / sum(samples)
    return pack({n: torch.tensordot(share.to(t), torch.stack([h[n] for h in heads]), 1) for n, t in heads[0].items()})


def weighted(logits: Tensor, labels: Tensor, share: Tensor, compat: str = "paper") -> Tensor:
    """A classifier's part of G's loss: every sample counts by the client's share of its class."""
    each = F.cross_entropy(logits, labels, reduction="none")
    return each.mean() * share.mean() if compat == "code" else (each * share).mean()


def step(
    network: nn.Module, student: Student, known: Sequence[tuple[Classifier, Tensor]], compat: str, noise: Tensor, labels: Tensor
) -> None:
    """One step of G: towards features that the classifiers know, each with its client's share of every class."""
    z = torch.func.functional_call(network.train(), dict(student.tensors), (noise, labels))
    lost = [weighted(classifier(z), labels, share[labels], compat) for classifier, share in known]
    student.update(torch.stack(lost).sum() + diversity(noise, z))


def generative_given(client: Client, received: Message, alpha: float, beta: float) -> Given:
    """What `generative` is given of what a client received."""
    columns = None
    if "weights" in received:
        columns = columns_of(client.reference, client.view, client.reference.taps.head)
    return {
        **{f"generator/{name}": t for name, t in received["generator"].items()},
        "seen": received["classes"]["seen"],
        "strength": torch.tensor([alpha, beta], device=client.place),
        "key": torch.tensor(derive(client.site.seed, "fedgen", client.id, client.round), device=client.place),
        **({} if columns is None else {"columns": columns}),
    }


def generative(net: Net, batch: Batch, given: Given, *, head: str, count: int, noise: int, classes: int) -> Tensor:
    """Cross-entropy, and what the generator knows of the batch's labels and of others'."""
    logits = net(batch.x)
    loss = batch.mean(losses(logits, batch.y))
    state = {name.removeprefix("generator/"): t for name, t in given.items() if name.startswith("generator/")}
    classifier = Classifier(head_of(net.params, head), given.get("columns"))
    key, number, (alpha, beta) = given["key"], 3 * batch.counter, given["strength"]
    teacher = classifier(generated(state, uniform(key, number, (len(batch.x), noise)), batch.y, classes))
    loss = loss + beta * distillation(teacher.detach(), logits, batch=batch)
    labels = drawn(given["seen"], uniform(key, number + 1, (count,)))
    others = classifier(generated(state, uniform(key, number + 2, (count, noise)), labels, classes))
    rows = len(batch.x) if batch.mask is None else batch.mask.sum()
    return loss + count / rows * alpha * F.cross_entropy(others, labels)


def drawn(seen: Tensor, uniform: Tensor) -> Tensor:
    """Labels, evenly drawn from the classes that are flagged."""
    order = torch.argsort((~seen).to(torch.int8), stable=True)
    return order[(uniform * seen.sum()).long()]
