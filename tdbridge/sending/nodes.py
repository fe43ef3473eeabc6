"""What a message says of its tree, as nodes; and its non-tensor values."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tdbridge.errors import LayoutError
from tdbridge.layout.constants import Constant
from tdbridge.layout.spec import Path, path_str
from tdbridge.layout.tree import Node

Values = Mapping[Path, Mapping[str, Any]]
"""The non-tensor values of each node that has any, by its path."""


def values_of(constants: Sequence[tuple[Path, Sequence[tuple[str, Constant]]]]) -> Values:
    """The values in what `constants_of` gives; the pickler has no use for `Constant`."""
    return {path: {key: c.value for key, c in own} for path, own in constants}


def constants_in(values: Mapping[str, Any]) -> tuple[tuple[str, Constant], ...]:
    """The values of one node as its constants."""
    return tuple([(key, Constant(values[key])) for key in sorted(values)])


def described(
    skeleton: Any,
    values: Values,
    devices: Sequence[bool] = (),
    device: torch.device | None = None,
) -> Node:
    """The tree of a message as a `Node` without leaves.

    Raises:
        LayoutError: there are values of a node that it has not, or that has a leaf of that name.
    """
    try:
        rest, declared = dict(values), iter(devices)
        node = _node((), skeleton, rest, declared, device)
    except (TypeError, ValueError, AttributeError) as error:
        raise LayoutError(f"this message has no values or devices as they are: {error}") from error
    if rest or next(declared, None) is not None:
        raise LayoutError(f"this message has values or devices of no node: {list(rest)}.")
    return node


def _node(
    path: Path,
    skeleton: Any,
    values: dict[Path, Mapping[str, Any]],
    devices: Iterator[bool],
    device: torch.device | None,
) -> Node:
    cls, batch_size, names, unbatched, keys, nested = skeleton
    own = values.pop(path, {})
    children = [key for key, _ in nested]
    if twice := sorted({*keys, *children} & own.keys()):
        raise LayoutError(f"this message has {path_str((*path, twice[0]))} twice.")
    declares = next(devices, False)
    return Node(
        source=dict.fromkeys([*keys, *children, *own]),
        cls=cls,
        batch_size=batch_size,
        names=names,
        constants=constants_in(own),
        keys=keys,
        leaves=[],
        nested=tuple(
            [(key, _node((*path, key), tree, values, devices, device)) for key, tree in nested]
        ),
        unbatched=unbatched,
        device=device if declares else None,
    )
