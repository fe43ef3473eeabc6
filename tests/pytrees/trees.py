"""The zoo as ArrayDicts, and what is compared in two trees."""

from typing import Any

import jax
import numpy as np
from tensordict import NonTensorData

import tdbridge
from tdbridge import ArrayDict
from tests import zoo

STRUCTURES = [
    "nested", "deeper_batch", "empty", "empty_inside", "no_batch", "zero_batch", "non_tensors",
    "tensorclass", "tensorclass_inside", "subclass", "odd_keys", "with_device",
]  # fmt: skip
"""Trees that differ in more than their leaves, for rules that the leaves have no part in."""

NARROW = [name for name in zoo.TREES if name not in zoo.X64_ONLY]
"""The trees whose every leaf JAX keeps exactly."""


def arrays(name: str) -> Any:
    """A tree of the zoo as an ArrayDict; 64-bit leaves stay 64-bit."""
    with jax.enable_x64(True):
        return tdbridge.to_jax(zoo.TREES[name]())


def both(name: str) -> tuple[Any, Any]:
    """A tree of the zoo as it is, and as an ArrayDict."""
    return zoo.TREES[name](), arrays(name)


def jax_tensordict(name: str) -> Any:
    """A tree of the zoo whose leaves are jax arrays: a locked TensorDict, or a tensorclass."""
    return jax.tree.map(lambda leaf: jax.numpy.asarray(zoo.as_numpy(leaf)), zoo.TREES[name]())


def nodes(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The ArrayDicts of a tree by path, the root included."""
    found = {path: tree}
    for key, value in tree.items():
        if isinstance(value, ArrayDict):
            found.update(nodes(value, (*path, key)))
    return found


def constants(tree: Any) -> dict[str, Any]:
    """The non-tensor entries of one node of a TensorDict or tensorclass."""
    entries = {key: tree.get(key) for key in tree.keys()}  # noqa: SIM118 - a TensorDict
    return {k: v.data for k, v in entries.items() if isinstance(v, NonTensorData)}


def values(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of any pytree as numpy, by key path."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


def assert_same_values(found: Any, expected: Any) -> None:
    """Equal key paths, and at each of them equal dtype, shape and bits."""
    a, b = values(found), values(expected)
    assert a.keys() == b.keys()
    assert [path for path in a if not zoo.same_bits(a[path], b[path])] == []
