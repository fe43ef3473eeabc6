"""Which classes a node can have, and their names outside the process."""

import sys
from typing import Any

from tensordict import NonTensorData, TensorDict, TypedTensorDict, is_tensorclass

from tdbridge.errors import LayoutError


def is_supported(cls: type) -> bool:
    """Whether a node can be of class `cls`: TensorDict, its subclasses, and tensorclasses."""
    return issubclass(cls, (TensorDict, TypedTensorDict)) or (
        is_tensorclass(cls) and not issubclass(cls, NonTensorData)
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
