"""PruneFL's adjustment of a mask: which weights are worth their time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nestling.methods.api import Phase, Piece, Reference, State, Tensors, View, World
from nestling.models.record import blank_inputs
from nestling.models.taps import watching
from nestling.seeds import torch_seeded
from nestling.training.objectives import Batch, Net
from nestling.training.trainer import batches
from nestling.views.sparse import lowest_off, prunable
from nestling.world import Plan


def adjust(
    weights: Tensors,
    masks: Tensors,
    squares: Tensors,
    seconds: Mapping[str, float],
    constant: float,
    rho: float,
) -> State:
    """The new masks. In every layer all but a share `rho` of the kept weights, the smallest, stay. The others and all pruned ones
    enter in the order of squared gradient per second, as long as each has more of it than the network with those before it."""
    left = {name: lowest_off(weights[name], mask, rho) for name, mask in masks.items()}
    gain = sum(float(g[left[name]].double().sum() if name in left else g.double().sum()) for name, g in squares.items())
    time = constant + sum(seconds[name] * int(mask.sum()) for name, mask in left.items())
    others = {name: squares[name].double()[~mask] for name, mask in left.items()}
    gains = torch.cat(list(others.values()))
    times = torch.cat([torch.full_like(g, seconds[name]) for name, g in others.items()])
    entering = torch.zeros(len(gains), dtype=torch.bool, device=gains.device)
    order = torch.sort(gains / times, descending=True, stable=True).indices
    entering[order[: _worthwhile(gains[order], times[order], gain, time)]] = True
    for (name, _), enter in zip(others.items(), entering.split([len(g) for g in others.values()]), strict=True):
        left[name][~left[name]] = enter
    return left


def _worthwhile(gains: Tensor, times: Tensor, gain: float, time: float) -> int:
    """How many of the candidates, best first, each raise the gain per second of all before them."""
    before = (gain + gains.cumsum(0) - gains) / (time + times.cumsum(0) - times).clamp(min=1e-300)
    raises = gains / times > before
    return int(raises.long().cumprod(0).sum())


def squared_gradients(
    module: nn.Module, phase: Phase, x: Tensor, y: Tensor, seed: int, client: int, round: int, number: int = 0
) -> State:
    """(Σ g)² of every parameter over the phase's batches, pruned weights included, at the weights that the module has."""
    module.train()
    params = dict(module.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    with torch_seeded(seed, "squares", client, round, number):
        for k, rows in enumerate(batches(len(x), phase, module, seed, client, round, number)):
            rows = rows.to(x.device)
            loss = phase.objective(Net(module, params), Batch(x[rows], y[rows], rows, k), phase.given)
            grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
            for name, grad in zip(params, grads, strict=True):
                total[name] += 0 if grad is None else grad
    return {name: g.square() for name, g in total.items()}


def trained_part(piece: Piece) -> View:
    """The piece without masks and buffers: what squared gradients are of."""
    buffers = frozenset(name for name in piece.reference.axes.shapes if name not in piece.reference.parameters)
    return View(piece.view.axes, piece.view.keep, piece.view.dropped | buffers)


def weight_seconds(world: World, steps: int) -> dict[str, float]:
    """Seconds per round for one weight of every prunable tensor, on the devices that take longest for the whole network: it travels
    down and up once, and takes three multiplications for each place and sample that it is used at."""
    samples = steps * world.train.batch if steps else world.train.epochs * world.plans[next(iter(world.plans))].budget.samples
    uses = weight_uses(world.main)
    every = [{name: _seconds(plan, samples * uses[name]) for name in uses} for plan in world.plans.values()]
    sizes = {name: world.main.initial[name].numel() for name in uses}
    return max(every, key=lambda found: sum(sizes[name] * t for name, t in found.items()))


def _seconds(plan: Plan, uses: int) -> float:
    profile = plan.profile
    return 32 / float(profile.down_bps) + 32 / float(profile.up_bps) + 3 * uses / float(profile.macs_per_second)


@torch.no_grad()
def weight_uses(reference: Reference) -> dict[str, int]:
    """How often one weight of every prunable tensor is multiplied in a sample's forward pass: once for every place of a map."""
    uses = dict.fromkeys(prunable(reference), 1)
    module = reference.network(reference.full).eval()
    layers = {name: layer for name, layer in module.named_modules() if f"{name}.weight" in uses}
    with watching(module, list(layers)) as seen:
        module(blank_inputs(module, reference.shape, 1))
    for name, out in seen.items():
        channels = out.shape[-1] if isinstance(layers[name], (nn.Linear, nn.Embedding)) else out.shape[1]
        uses[f"{name}.weight"] = out.numel() // channels
    return uses
