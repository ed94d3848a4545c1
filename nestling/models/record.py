"""The aten operations of one forward, recorded on the meta device: shapes and dependencies, no
arithmetic.

What an operation keeps for its backward is a property of the operation alone, so a table by name is
enough and any module works; an operation missing from the table is taken to keep all it read and
wrote.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nestling.errors import InputError
from nestling.seeds import torch_seeded

# The two operands of a product: the gradient of one needs the other.
PRODUCTS = {
    "convolution": (0, 1), "linear": (0, 1), "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1),
    "dot": (0, 1), "matmul": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2), "addbmm": (1, 2), "mul": (0, 1),
    "div": (0, 1),
}  # fmt: skip
KEEPS_NOTHING = {
    "add", "sub", "rsub", "neg", "sum", "mean", "cat", "stack", "clone", "copy", "_to_copy",
    "avg_pool1d", "avg_pool2d",
    "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool2d",
    "constant_pad_nd", "reflection_pad1d",
    "reflection_pad2d", "replication_pad1d", "replication_pad2d", "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_bilinear2d", "pixel_shuffle", "channel_shuffle", "native_channel_shuffle", "flip",
    "roll", "repeat", "fill", "zero",
    "bernoulli",
}  # fmt: skip
KEEPS_OUTPUT = {
    "relu", "hardtanh", "leaky_relu", "sigmoid", "tanh", "elu", "hardsigmoid", "clamp", "clamp_min",
    "clamp_max", "exp", "sqrt",
    "rsqrt", "_softmax", "_log_softmax", "_safe_softmax",
}  # fmt: skip
KEEPS_INPUT = {
    "silu", "gelu", "hardswish", "mish", "softplus", "threshold", "log", "pow", "abs",
    "log_sigmoid_forward", "embedding",
}  # fmt: skip
# The flags of what was overwritten, through which no gradient goes; its second argument.
MASKED = {"masked_fill"}
# Input, and the small statistics beside the output.
NORMS = {
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_batch_norm_with_update",
    "native_group_norm", "native_layer_norm", "_fused_rms_norm", "var_mean",
}  # fmt: skip
# Where the winner of each window was: one byte per output, whatever integer type torch uses.
POOLS = {
    "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "fractional_max_pool2d",
    "max", "min",
}  # fmt: skip
# Same shape in and out, entry by entry: may overwrite an operand nobody else wants.
ELEMENTWISE = {
    "add", "sub", "rsub", "neg", "mul", "div", "relu", "hardtanh", "leaky_relu", "sigmoid", "tanh",
    "elu", "hardsigmoid", "clamp",
    "clamp_min", "clamp_max", "exp", "sqrt", "rsqrt", "silu", "gelu", "hardswish", "mish",
    "softplus", "threshold", "masked_fill",
}  # fmt: skip
# Computed where its producer wrote, and undone from the output alone: a runtime fuses it into the
# producer.
FUSED = {
    "relu",
    "hardtanh",
    "leaky_relu",
    "sigmoid",
    "tanh",
    "elu",
    "hardsigmoid",
    "clamp",
    "clamp_min",
    "clamp_max",
}
CREATES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "new_",
    "rand",
    "arange",
    "scalar_tensor",
    "linspace",
    "eye",
)
MOVES_SHAPE_ONLY = {
    "transpose",
    "t",
    "squeeze",
    "unsqueeze",
    "detach",
    "as_strided",
    "resize",
    "swapaxes",
    "requires_grad",
}


@dataclass(frozen=True)
class Seen:
    """A tensor among the arguments of an operation: a value of the forward or, by its name in the
    state, a weight.

    `whole` says that it is its storage from the first entry to the last in order; `transposed` the
    same of its transpose.
    """

    value: int | None
    name: str | None
    shape: tuple[int, ...]
    whole: bool
    transposed: bool


@dataclass
class Operation:
    """One operation, over value numbers. A value is one storage: views and in-place results share
    their number."""

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    keeps: frozenset[int]  # what its backward needs
    trained: bool  # it has a backward
    on_path: bool  # it reads something made from the input
    elementwise: bool
    macs: int = 0
    backward_macs: int = 0
    layer: str = ""  # the module that was running, by its name inside the whole
    # by the operation's own names; a tensor is a `Seen`
    arguments: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = ()  # of the first result
    scratch: int = -1  # a value that is there only while it works, forward or backward


@dataclass
class Record:
    """A forward: its operations in order, the bytes of every value, and which values are input,
    outputs and trained."""

    operations: list[Operation] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    batch: int = 1  # samples in the recorded tensors; bytes are for one
    trained: set[int] = field(default_factory=set)  # values that receive a gradient


def record(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    *,
    training: bool = True,
) -> Record:
    """Record one forward of one sample of `shape` (without the batch), in training mode unless told
    otherwise."""
    if not all(isinstance(side, int) and side > 0 for side in shape):
        fix = "give the sides of one sample, such as (3, 32, 32)"
        raise InputError(f"{shape!r} is not an input shape", field="shape", fix=fix)
    twin = on_meta(module).train(training)
    try:
        return _run(twin, shape, dtype or input_dtype(module), batch=1)
    except ValueError as error:
        # Batch statistics of a single value are refused by torch; two samples cost exactly twice as
        # much.
        if "more than 1 value per channel" not in str(error):
            raise _failed(module, shape, error) from error
    except Exception as error:
        raise _failed(module, shape, error) from error
    return _run(twin, shape, dtype or input_dtype(module), batch=2)


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of the module without data; shared parameters stay shared."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(
            _hollow(parameter), requires_grad=parameter.requires_grad
        )
    for buffer in module.buffers():
        memo[id(buffer)] = _hollow(buffer)
    return copy.deepcopy(module, memo)


def _hollow(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="meta")


def words_of(module: nn.Module) -> int:
    """How many words a network of token ids knows, which begins with an embedding; 0 for others."""
    own = (m for m in module.modules() if next(m.parameters(recurse=False), None) is not None)
    first = next(own, None)
    return first.num_embeddings if isinstance(first, nn.Embedding) else 0


def input_dtype(module: nn.Module) -> torch.dtype:
    """The type of the inputs: whole numbers where they are token ids."""
    return torch.long if words_of(module) else torch.float32


def blank_inputs(module: nn.Module, shape: Sequence[int], rows: int = 2) -> Tensor:
    """Zeros that a network takes; as token ids, one that there always is."""
    place = next(module.parameters()).device
    return torch.zeros(rows, *shape, dtype=input_dtype(module), device=place)


def varied_inputs(module: nn.Module, shape: Sequence[int], rows: int = 2) -> Tensor:
    """Inputs that a network takes, as unlike each other as they can be."""
    place, words = next(module.parameters()).device, words_of(module)
    numbers = torch.arange(rows * math.prod(shape), device=place)
    return (numbers % words if words else numbers.float().sin()).reshape(rows, *shape)


def _failed(module: nn.Module, shape: tuple[int, ...], error: Exception) -> InputError:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    fix = (
        "check that the network takes such an input, and that its forward does not look at "
        "values (.item(), if x.sum() > 0)"
    )
    return InputError(
        f"{type(module).__name__} cannot run on an input of shape {shape}: {text}",
        field="model",
        fix=fix,
    )


def _run(twin: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, batch: int) -> Record:
    recorder = _Recorder(twin, batch)
    sample = torch.empty((batch, *shape), dtype=dtype, device="meta")
    recorder.record.inputs = (recorder.value(sample),)
    recorder.path.add(recorder.record.inputs[0])
    recorder.follow(twin)
    with torch.no_grad(), torch_seeded(0, "cost"), recorder:
        out = twin(sample)
    ends = [
        recorder.value(leaf)
        for leaf in tree_leaves(out)
        if isinstance(leaf, Tensor) and not recorder.is_weight(leaf)
    ]
    if not ends:
        raise ValueError("its forward returns no tensor")
    recorder.record.outputs = tuple(dict.fromkeys(ends))
    return recorder.record


class _Recorder(TorchDispatchMode):
    def __init__(self, module: nn.Module, batch: int) -> None:
        super().__init__()
        self.record = Record(batch=batch)
        self.batch = batch
        self.path: set[int] = set()
        self.numbers: dict[int, int] = {}
        self.weights: dict[int, bool] = {}  # storage -> is trained
        self.names: dict[int, str] = {}  # storage -> name in the state
        self.layers: list[str] = []  # the modules that are running, outermost first
        self.held: list[Any] = []  # a storage that is freed would give its key to another
        for name, parameter in module.named_parameters():
            self.weights[self._key(parameter)] = parameter.requires_grad
            self.names[self._key(parameter)] = name
        for name, buffer in module.named_buffers():
            self.weights.setdefault(self._key(buffer), False)
            self.names.setdefault(self._key(buffer), name)

    def follow(self, module: nn.Module) -> None:
        """Keep note of which part of the module is running."""
        for name, part in module.named_modules():
            part.register_forward_pre_hook(partial(self._enter, name))
            part.register_forward_hook(self._leave)

    def _enter(self, name: str, *_: Any) -> None:
        self.layers.append(name)

    def _leave(self, *_: Any) -> None:
        self.layers.pop()

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.held.append(storage)
        return int(storage._cdata)

    def is_weight(self, tensor: Tensor) -> bool:
        return self._key(tensor) in self.weights

    def value(self, tensor: Tensor) -> int:
        key = self._key(tensor)
        if key not in self.numbers:
            self.numbers[key] = len(self.record.bytes)
            whole = tensor.dim() > 0 and tensor.shape[0] % self.batch == 0
            self.record.bytes.append(
                tensor.numel() * tensor.element_size() // (self.batch if whole else 1)
            )
        return self.numbers[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._to_meta, (args, kwargs or {}))
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs = {**kwargs, "device": torch.device("meta")}
        out = func(*args, **kwargs)
        self._note(func, args, kwargs, out)
        return out

    def _to_meta(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta":
            return tensor
        constant = _hollow(tensor)  # a plain attribute of the module: neither parameter nor buffer
        self.weights[self._key(constant)] = False
        return constant

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.split("::")[1].rstrip("_")
        read = _tensors((args, kwargs)) if not name.startswith(CREATES) else []
        made = _tensors(out)
        before = {self._key(tensor) for tensor in _tensors((args, kwargs))}
        in_place = func._schema.is_mutable and name not in MOVES_SHAPE_ONLY
        if not in_place and all(self._key(tensor) in before for tensor in made):
            return  # a view
        made = [tensor for tensor in made if not self.is_weight(tensor)]
        if not made:
            return  # bookkeeping on buffers
        writes = self._values(made)
        if name in POOLS and len(made) > 1:
            self.record.bytes[writes[1]] = made[1].numel() // self.batch
        reads = self._values([tensor for tensor in read if not self.is_weight(tensor)])
        trained = any(self._is_trained(tensor) for tensor in read) or any(
            write in self.record.trained for write in writes
        )
        macs = _macs(name, args, made[0]) // self.batch
        self.record.operations.append(
            Operation(
                name, reads, writes, frozenset(self._keeps(name, args, reads, writes)), trained,
                on_path=bool(self.path.intersection(reads)), elementwise=name in ELEMENTWISE,
                macs=macs,
                backward_macs=macs * sum(self._is_trained(side) for side in _operands(name, args)),
                layer=self.layers[-1] if self.layers else "",
                arguments=self._arguments(func, args, kwargs),
                shape=tuple(made[0].shape),
            )
        )  # fmt: skip
        if self.path.intersection(reads):
            self.path.update(writes)
        if trained:
            self.record.trained.update(
                self._values([tensor for tensor in made if tensor.is_floating_point()])
            )

    def _arguments(self, func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        names = [argument.name for argument in func._schema.arguments]
        return tree_map_only(Tensor, self._seen, {**dict(zip(names, args, strict=False)), **kwargs})

    def _seen(self, tensor: Tensor) -> Seen:
        key = self._key(tensor)
        all_of_it = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        return Seen(
            value=self.numbers.get(key),
            name=self.names.get(key),
            shape=tuple(tensor.shape),
            whole=all_of_it and tensor.is_contiguous(),
            transposed=all_of_it and tensor.dim() == 2 and tensor.t().is_contiguous(),
        )

    def _values(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.value(tensor) for tensor in tensors))

    def _is_trained(self, tensor: Tensor) -> bool:
        key = self._key(tensor)
        return self.weights.get(key, False) or self.numbers.get(key, -1) in self.record.trained

    def _keeps(
        self, name: str, args: Any, reads: tuple[int, ...], writes: tuple[int, ...]
    ) -> set[int]:
        if name in PRODUCTS:
            sides = _operands(name, args)
            partners = [
                one
                for one, other in zip(sides, reversed(sides), strict=True)
                if self._is_trained(other)
            ]
            return (
                set(self._values(side for side in partners if not self.is_weight(side)))
                if len(sides) == 2
                else set()
            )
        if name in KEEPS_NOTHING or name.startswith(CREATES):
            return set()
        if name in KEEPS_OUTPUT:
            return set(writes)
        if name in KEEPS_INPUT:
            return set(reads)
        if name in MASKED:
            return set(reads[1:])
        if name in NORMS:
            return {*reads, *writes[1:]}
        if name in POOLS and len(writes) > 1:
            return set(writes[1:])
        return {*reads, *writes}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _operands(name: str, args: Any) -> list[Tensor]:
    """The tensors of a product; a plain number is no operand, since its gradient is never asked
    for."""
    sides = [args[position] for position in PRODUCTS.get(name, ()) if position < len(args)]
    return [side for side in sides if isinstance(side, Tensor)]


def _macs(name: str, args: Any, out: Tensor) -> int:
    if name == "convolution":
        weight, transposed = args[1], args[6]
        return (args[0] if transposed else out).numel() * math.prod(weight.shape[1:])
    if name == "addbmm":
        return int(args[1].numel() * args[2].shape[-1])
    if name in PRODUCTS and name not in ("mul", "div"):
        return out.numel() * int(_operands(name, args)[0].shape[-1])
    if "scaled_dot_product" in name:
        query, key, value = args[:3]
        return (
            query.numel() * key.shape[-2]
            + math.prod(query.shape[:-1]) * value.shape[-1] * key.shape[-2]
        )
    return 0
