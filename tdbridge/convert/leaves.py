"""Any pytree -> its leaves with paths, and back over other leaves."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from tdbridge.layout.spec import Path
from tdbridge.layout.tree import Node, is_node, tree_of, walk_leaves

Rebuild = Callable[[Node, Iterator[Any]], Any]


class Leaf(NamedTuple):
    """One leaf: its path from the root, its value, and whether a tensordict holds it."""

    path: Path
    value: Any
    in_node: bool


def take_apart(tree: Any) -> tuple[list[Leaf], Callable[[Sequence[Any], Rebuild], Any]]:
    """The leaves of `tree` with their paths, and a function that puts others in their place.

    Args:
        tree: a TensorDict, a tensorclass, an ArrayDict, or any pytree with or without them.

    Returns:
        The leaves, and `put_together(new_leaves, rebuild)`, where `rebuild(node, leaves)` makes
        each tensordict of the tree; other nodes are made by JAX as they were.
    """
    if is_node(tree):
        node = tree_of(tree)
        return _inside(node, ()), lambda new, rebuild: rebuild(node, iter(new))
    outer, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_node)
    leaves: list[Leaf] = []
    nodes: list[Node | None] = []
    for key_path, value in outer:
        path = tuple(_key_str(key) for key in key_path)
        node = tree_of(value, path) if is_node(value) else None
        nodes.append(node)
        leaves += [Leaf(path, value, False)] if node is None else _inside(node, path)

    def put_together(new: Sequence[Any], rebuild: Rebuild) -> Any:
        rest = iter(new)
        items = [next(rest) if node is None else rebuild(node, rest) for node in nodes]
        return jax.tree_util.tree_unflatten(treedef, items)

    return leaves, put_together


def _inside(node: Node, path: Path) -> list[Leaf]:
    return [Leaf(leaf_path, value, True) for leaf_path, value in walk_leaves(node, path)]


def _key_str(key: Any) -> str:
    """The bare name in a JAX key path entry: dict key, index or attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
