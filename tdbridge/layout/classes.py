"""Which classes a node can have, and their names outside the process."""

import sys
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictParams,
    TypedTensorDict,
    is_tensorclass,
)

from tdbridge.errors import LayoutError

Jagged: type = type(torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged))
"""The class of a jagged tensor, which has no public name."""


def stands_apart(cls: type) -> bool:
    """Whether a node of class `cls` has no part in the batch of the tree that it is in.

    The members of a lazy stack lack the dimension that they are stacked along, and the parts of a
    jagged tensor have no batch dimension at all.
    """
    return cls in (LazyStackedTensorDict, Jagged)


def is_supported(cls: type) -> bool:
    """Whether a node can be of class `cls`: TensorDict and its kin, and tensorclasses."""
    return (
        issubclass(cls, (TensorDict, TypedTensorDict, TensorDictParams))
        or stands_apart(cls)
        or (is_tensorclass(cls) and not issubclass(cls, NonTensorData))
    )


def class_name(cls: type) -> str:
    """`module:qualname`, or plain `TensorDict`, which has moved between modules."""
    return "TensorDict" if cls is TensorDict else f"{cls.__module__}:{cls.__qualname__}"


def class_from_name(name: str) -> type:
    """The class that `class_name` names, among those defined already: no import is done.

    Raises:
        LayoutError: no such class is defined here, or it is none that a node can have.
    """
    if name == "TensorDict":
        return TensorDict
    module, _, qualname = name.partition(":")
    cls: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # Not `getattr`: a module may import another one when it is asked for it.
        cls = getattr(cls, "__dict__", {}).get(part)
    if not (isinstance(cls, type) and is_supported(cls)):
        raise LayoutError(
            f"got class {name!r}, which is not defined in this process. "
            "Import the module that defines it first."
        )
    return cls
