"""A user's own network: a name of the form "package.module:callable"."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from torch import nn

from nestling.errors import InputError
from nestling.named_code import named_module

_FORM = (
    'write "package.module:callable", where callable takes shape= and classes= and returns a '
    "torch.nn.Module"
)


def build_own(
    name: str, *, shape: tuple[int, ...], classes: int, options: Mapping[str, object]
) -> nn.Module:
    """Import the callable, call it with shape, classes and the options, and make sure that a module
    comes back."""
    builder = _load(name)
    try:
        inspect.signature(builder).bind(shape=shape, classes=classes, **options)
    except TypeError as error:
        raise InputError(
            f"{name} cannot be called so: {error}", field="model.name", fix=_FORM
        ) from error
    except ValueError:
        pass  # no signature to read, as for a few built-ins: the call itself will tell
    try:
        network = builder(shape=shape, classes=classes, **options)
    except InputError:
        raise
    except Exception as error:
        message = f"{name} raised {type(error).__name__}: {error}"
        raise InputError(
            message, field="model.name", fix="mend the callable, or its options"
        ) from error
    if not isinstance(network, nn.Module):
        raise InputError(
            f"{name} returned {type(network).__name__}, not a module", field="model.name", fix=_FORM
        )
    return network


def _load(name: str) -> Callable[..., object]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise InputError(f"{name!r} does not name a callable", field="model.name", fix=_FORM)
    try:
        module = named_module(name, "model.name")
    except InputError:
        raise
    except Exception as error:
        message = f"cannot import {module_name!r}: {type(error).__name__}: {error}"
        raise InputError(
            message,
            field="model.name",
            fix="check the name, and that the module is on Python's path",
        ) from error
    builder = getattr(module, attribute, None)
    if not callable(builder):
        problem = "is not callable" if hasattr(module, attribute) else "does not exist"
        raise InputError(
            f"{attribute!r} in {module_name!r} {problem}", field="model.name", fix=_FORM
        )
    return builder
