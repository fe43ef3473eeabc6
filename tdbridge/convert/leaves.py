"""Any pytree -> its leaves, and back over other leaves."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax

from tdbridge.convert.records import is_record, opened
from tdbridge.errors import LayoutError, LeafTypeError, TdbridgeError
from tdbridge.layout.spec import Path, path_str
from tdbridge.layout.tree import Node, is_node, leaves_of, paths_of, tree_of
from tdbridge.pytrees.packed import PackedArrayDict

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


def is_unpacked(value: Any) -> bool:
    """Whether `value` is a tree of ours with a leaf for each key.

    A packed one is a pytree of its segments, and stays packed where it is taken for no more.
    """
    return is_node(value) and not isinstance(value, PackedArrayDict)


def take_apart(tree: Any, is_tree: Callable[[Any], bool] = is_node) -> Parts:
    """Takes apart a TensorDict, a tensorclass, an ArrayDict, or any pytree with them or without.

    Args:
        tree: what to take apart.
        is_tree: what is taken apart by what tdbridge knows of it, and not as a pytree.
    """
    if is_tree(tree):
        node = tree_of(tree)
        leaves = leaves_of(node)
        return Parts(
            leaves,
            frozenset(),
            lambda: paths_of(node),
            lambda new, rebuild: rebuild(node, iter(new)),
        )
    return _take_apart_pytree(tree, is_tree)


def _take_apart_pytree(tree: Any, is_tree: Callable[[Any], bool]) -> Parts:
    outer, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_tree)
    if any(map(is_record, {*map(type, outer)})):
        tree = opened(tree)
        outer, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_tree)

    def roots() -> list[Path]:
        return [path for path, _ in with_paths(tree, is_tree)]

    try:
        nodes = [tree_of(value) if is_tree(value) else None for value in outer]
    except LeafTypeError:  # again, to name the path
        nodes = [tree_of(v, p) if is_tree(v) else None for v, p in zip(outer, roots(), strict=True)]
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
    target: Callable[[Path], Any] | None = None,
) -> Sequence[Any]:
    """The leaves, those that cross converted, all of them in one call.

    Leaves that are one object (tied weights) are converted once, and stay one.

    Args:
        parts: the tree.
        crosses: whether a leaf crosses, from its type and from whether it is loose.
        convert: from the leaves that cross, and a function that gives their paths.
        target: what the leaf at a path becomes; one object that becomes two things is two leaves.
    """
    leaves = parts.leaves
    at = crossing(parts, crosses)
    own = leaves if len(at) == len(leaves) else [leaves[i] for i in at]
    keys: list[Any] = list(map(id, own))
    if target is not None and len({*keys}) < len(keys):
        every = parts.paths()
        keys = [(key, target(every[i])) for key, i in zip(keys, at, strict=True)]
    places = tied(keys)
    if places is None and own is leaves:
        return convert(leaves, parts.paths)
    groups = [[i] for i in at] if places is None else [[at[i] for i in same] for same in places]

    def convert_at(positions: Sequence[int]) -> Sequence[Any]:
        def paths() -> list[Path]:
            every = parts.paths()
            return [every[i] for i in positions]

        return convert([leaves[i] for i in positions], paths)

    try:
        converted = convert_at([same[0] for same in groups])
    except TdbridgeError:
        convert_at(at)  # raises the same, with the paths of all that are tied
        raise
    new = list(leaves)
    for same, value in zip(groups, converted, strict=True):
        for i in same:
            new[i] = value
    return new


def tied(keys: Sequence[Any]) -> list[list[int]] | None:
    """The positions at which each key stands, grouped; None when no two keys are equal."""
    if len({*keys}) == len(keys):
        return None
    places: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        places.setdefault(key, []).append(i)
    return list(places.values())


def spread(groups: Sequence[Sequence[int]], values: Sequence[Any]) -> list[Any]:
    """The value of each group at each of its positions."""
    found = {i: value for group, value in zip(groups, values, strict=True) for i in group}
    return [found[i] for i in range(len(found))]


def refuse_paths(name: str, missing: Iterable[Path], extra: Iterable[Path]) -> None:
    """Raises one error that lists where a tree given beside the tree has other paths.

    Args:
        name: the argument that gave it.
        missing: paths of leaves for which it has nothing.
        extra: its own paths where the tree has no leaf.

    Raises:
        LayoutError: there is at least one path.
    """
    found = [f"  {path_str(path)}: not in `{name}`." for path in missing]
    found += [f"  {path_str(path)}: in `{name}`, and no leaf of the tree." for path in extra]
    if found:
        text = "\n".join(found)
        raise LayoutError(f"`{name}` does not have the structure of the tree:\n{text}")


def with_paths(tree: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[Path, Any]]:
    """The leaves of a pytree, each with its path; what `is_leaf` says is one of them."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(tuple(map(_key_str, keys)), leaf) for keys, leaf in found]


def _key_str(key: Any) -> str:
    """The bare name in a JAX key path entry: dict key, index or attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
