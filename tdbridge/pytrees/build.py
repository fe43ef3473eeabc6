"""Nested mappings -> the definition and the children of an ArrayDict, checked."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from tensordict import is_tensor_collection

from tdbridge.errors import LeafTypeError
from tdbridge.layout.constants import Constant
from tdbridge.layout.spec import Path, path_str
from tdbridge.pytrees.static import Names, NodeDef, Size, with_children

Make = Callable[[NodeDef, Sequence[Any]], Any]


def build(source: Mapping[Any, Any], like: NodeDef, make: Make, path: Path = ()) -> Any:
    """An ArrayDict over `source`, of the batch size, names and class of `like`.

    Raises:
        LeafTypeError: a torch tensor or a TensorDict is among the values.
        ValueError: a key is no string, or a leaf does not start with the batch size.
    """
    size = like.batch_size or ()
    children, constants = {}, []
    for key, value in nested(source, path).items():
        entry = _entry(value, size, like.names, make, (*path, key))
        if isinstance(entry, Constant):
            constants.append((key, entry))
        else:
            children[key] = entry
    keys = tuple(sorted(children))
    values = [children[key] for key in keys]
    constants.sort(key=lambda item: item[0])
    definition = NodeDef(
        cls=like.cls, names=like.names, constants=tuple(constants), batch_size=size
    )
    return make(with_children(definition, keys, values, len(size)), values)


def nested(source: Mapping[Any, Any], path: Path = ()) -> dict[str, Any]:
    """`source` with tuple keys opened into nested dicts, one level of them.

    Raises:
        ValueError: a key is neither a string nor a tuple of strings, or is a leaf and a tree.
    """
    opened: dict[str, Any] = {}
    for key, value in source.items():
        parts = (key,) if isinstance(key, str) else key
        if not (isinstance(parts, tuple) and parts and all(isinstance(p, str) for p in parts)):
            raise ValueError(f"{path_str(path)}: keys are strings or tuples of them, got {key!r}.")
        level = opened
        for depth, part in enumerate(parts[:-1]):
            inner = level.get(part, {})
            if not isinstance(inner, Mapping):
                raise ValueError(f"{path_str((*path, *parts[: depth + 1]))} is a leaf and a tree.")
            level[part] = level = dict(inner)
        if parts[-1] in level:
            raise ValueError(f"{path_str((*path, *parts))} is given twice.")
        level[parts[-1]] = value
    return opened


def _entry(value: Any, size: Size, names: Names | None, make: Make, path: Path) -> Any:
    if isinstance(value, torch.Tensor) or is_tensor_collection(value):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise LeafTypeError(
            f"{path_str(path)}: got a {kind}. Convert it with tdbridge.to_jax first."
        )
    if isinstance(value, Mapping) and not hasattr(value, "_definition"):
        return build(value, NodeDef(names=names, batch_size=size), make, path)
    if isinstance(value, (bool, int, float, complex)):
        value = jnp.asarray(value)
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple):
        return Constant(value)
    if tuple(shape[: len(size)]) != size:
        raise ValueError(
            f"{path_str(path)}: got shape {shape}, which does not start with batch_size {size}."
        )
    return value
