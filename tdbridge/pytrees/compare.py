"""== and != of trees: elementwise, as on a TensorDict."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tdbridge.layout.constants import Constant
from tdbridge.pytrees.build import build
from tdbridge.pytrees.entries import Child, Make, entries_of, is_nested
from tdbridge.pytrees.shaping import numpy_for

Compare = Callable[[Any, Any], Any]


def compared(tree: Any, other: object, compare: Compare, make: Make) -> Any:
    """`compare` of each leaf with the one at the same key, or with a number or an array.

    A non-tensor entry becomes a leaf too: true or false for the whole batch.

    Raises:
        KeyError: the two have not the same keys; the error lists those of one alone.
    """
    if isinstance(other, Mapping):
        return _of_trees(tree, _as_tree(other, tree, make), compare)
    if getattr(other, "shape", None) is None and not isinstance(other, (int, float, complex)):
        return NotImplemented
    return tree.map(lambda leaf: compare(leaf, other))


def _as_tree(other: Mapping[str, Any], tree: Any, make: Make) -> Any:
    return other if is_nested(other) else build(other, tree._like(), make)


def _of_trees(a: Any, b: Any, compare: Compare) -> Any:
    mine, theirs = entries_of(a), entries_of(b)
    if only := mine.keys() ^ theirs.keys():
        raise KeyError(f"keys differ: {sorted(only)} are in one alone")
    size = a.batch_size
    found = {key: _of_entries(left, theirs[key], size, compare) for key, left in mine.items()}
    return a._with_entries(found)


def _of_entries(left: Any, right: Any, size: tuple[int, ...], compare: Compare) -> Child:
    if isinstance(left, Constant) or isinstance(right, Constant):
        return Child(np.full(size, compare(left == right, True)), 0)
    if is_nested(left.value) and is_nested(right.value):
        return Child(_of_trees(left.value, right.value, compare), left.event_dims)
    numpy_for((left.value, right.value))  # raises where JAX would compare narrowed values
    return Child(compare(left.value, right.value), left.event_dims)
