"""Any pytree -> its leaves, and back over other leaves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax

from tdbridge.errors import LeafTypeError
from tdbridge.layout.spec import Path
from tdbridge.layout.tree import Node, is_node, leaves_of, paths_of, tree_of

Rebuild = Callable[[Node, Iterator[Any]], Any]


@dataclass(slots=True)
class Parts:
    """A tree taken apart.

    Attributes:
        leaves: all of them.
        loose: the positions of the leaves that no tensordict holds; they may be anything.
        paths: gives the path of each leaf; errors need it, conversions do not.
        put_together: makes the tree again over other leaves, where `rebuild(node, leaves)` makes
            each tensordict of it; other containers are made by JAX as they were.
    """

    leaves: list[Any]
    loose: frozenset[int]
    paths: Callable[[], list[Path]]
    put_together: Callable[[Sequence[Any], Rebuild], Any]


def take_apart(tree: Any) -> Parts:
    """Takes apart a TensorDict, a tensorclass, an ArrayDict, or any pytree with them or without."""
    if is_node(tree):
        node = tree_of(tree)
        leaves = leaves_of(node)
        return Parts(
            leaves,
            frozenset(),
            lambda: paths_of(node),
            lambda new, rebuild: rebuild(node, iter(new)),
        )
    return _take_apart_pytree(tree)


def _take_apart_pytree(tree: Any) -> Parts:
    outer, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_node)

    def roots() -> list[Path]:
        keyed, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_node)
        return [tuple(_key_str(key) for key in key_path) for key_path, _ in keyed]

    try:
        nodes = [tree_of(value) if is_node(value) else None for value in outer]
    except LeafTypeError:  # again, to name the path
        nodes = [tree_of(v, p) if is_node(v) else None for v, p in zip(outer, roots(), strict=True)]
    groups = [[v] if n is None else leaves_of(n) for v, n in zip(outer, nodes, strict=True)]
    leaves = [leaf for group in groups for leaf in group]
    starts = accumulate(map(len, groups), initial=0)
    loose = frozenset([at for at, node in zip(starts, nodes, strict=False) if node is None])

    def paths() -> list[Path]:
        found = [[p] if n is None else paths_of(n, p) for p, n in zip(roots(), nodes, strict=True)]
        return [path for group in found for path in group]

    def put_together(new: Sequence[Any], rebuild: Rebuild) -> Any:
        rest = iter(new)
        items = [next(rest) if node is None else rebuild(node, rest) for node in nodes]
        return jax.tree_util.tree_unflatten(treedef, items)

    return Parts(leaves, loose, paths, put_together)


def crossing(parts: Parts, crosses: Callable[[type, bool], bool]) -> Sequence[int]:
    """The positions of the leaves that cross, from their types and from which are loose."""
    leaves, loose = parts.leaves, parts.loose
    if not loose and all(crosses(kind, False) for kind in {*map(type, leaves)}):
        return range(len(leaves))
    return [i for i, leaf in enumerate(leaves) if crosses(type(leaf), i in loose)]


def replace_some(
    parts: Parts,
    crosses: Callable[[type, bool], bool],
    convert: Callable[[list[Any], Callable[[], list[Path]]], Sequence[Any]],
) -> Sequence[Any]:
    """The leaves, those that cross converted, all of them in one call.

    Args:
        parts: the tree.
        crosses: whether a leaf crosses, from its type and from whether it is loose.
        convert: from the leaves that cross, and a function that gives their paths.
    """
    leaves = parts.leaves
    at = crossing(parts, crosses)
    if len(at) == len(leaves):
        return convert(leaves, parts.paths)

    def paths() -> list[Path]:
        every = parts.paths()
        return [every[i] for i in at]

    new = list(leaves)
    for i, value in zip(at, convert([leaves[i] for i in at], paths), strict=True):
        new[i] = value
    return new


def _key_str(key: Any) -> str:
    """The bare name in a JAX key path entry: dict key, index or attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
