"""How a tree is printed: keys, dtypes, shapes, and shardings that are not the default."""

from typing import Any

from jax.core import Tracer

from tdbridge.pytrees.entries import is_nested


def describe(tree: Any) -> str:
    """`ArrayDict(batch_size=[4], fields={...})`, one line per entry, nested trees indented."""
    return f"{_title(tree)}\n{_entries(tree, 1)})" if len(tree) else f"{_title(tree)})"


def _title(tree: Any) -> str:
    names = f", names={tree.names}" if any(name is not None for name in tree.names) else ""
    cls = tree.tensorclass.__name__
    kind = f", tensorclass={cls}" if cls != "TensorDict" else ""
    return f"ArrayDict(batch_size={list(tree.batch_size)}{names}{kind},"


def _entries(tree: Any, depth: int) -> str:
    indent = "    " * depth
    lines = []
    for key, value in tree.items():
        if is_nested(value):
            size = list(value.batch_size)
            lines.append(f"{indent}{key}: batch_size={size}")
            lines += [_entries(value, depth + 1)] if len(value) else []
        else:
            lines.append(f"{indent}{key}: {_leaf(value)}")
    return "\n".join(lines)


def _leaf(value: Any) -> str:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return repr(value)
    return f"{dtype}[{','.join(map(str, shape))}]{_sharding(value)}"


def _sharding(value: Any) -> str:
    """Where the leaf lives: nothing on one device, the spec on several, a tracer has no place."""
    sharding: Any = None if isinstance(value, Tracer) else getattr(value, "sharding", None)
    spec = getattr(sharding, "spec", None)
    return "" if spec is None or len(sharding.device_set) == 1 else f" {spec}"
