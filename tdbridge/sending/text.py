"""A plan as text and classes, and back: what a message says of its tree, next to the buffer.

The text is JSON without the classes, which go through the pickler by reference as classes do. The
offsets of the leaves are not in it: the reader computes them anew.
"""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from tdbridge.errors import LayoutError
from tdbridge.layout.classes import is_supported
from tdbridge.layout.plan import Plan, parts_of, plan_of_rows
from tdbridge.layout.spec import Layout, Path
from tdbridge.layout.validate import check_layout, sizes_of

_VERSION = 1

Row = tuple[Path, str, tuple[int, ...]]


@lru_cache(maxsize=256)
def text_of(plan: Plan) -> tuple[str, tuple[type, ...]]:
    """A plan as text, and the classes that the text counts.

    The second message of one structure costs neither the sender nor the reader any planning.
    """
    classes: dict[type, int] = {}
    tree = _tree_data(plan.skeleton, classes)
    leaves = [plan.layout.leaves[i] for i in plan.order]
    runs = [
        [dtype, shape, len(list(run))]
        for (dtype, shape), run in groupby(leaves, lambda leaf: (leaf.dtype, leaf.shape))
    ]
    return json.dumps([_VERSION, tree, runs], separators=(",", ":")), tuple(classes)


def _tree_data(skeleton: Any, classes: dict[type, int]) -> list[Any]:
    cls, batch_size, names, unbatched, keys, nested = skeleton
    number = classes.setdefault(cls, len(classes))
    below = [[key, _tree_data(child, classes)] for key, child in nested]
    return [number, batch_size, names, sorted(unbatched), keys, below]


def plan_from(text: Any, classes: Any) -> Plan:
    """The plan that `text_of` gave the text of.

    Nothing in the text is executed, and no size in it is trusted.

    Raises:
        LayoutError: it is no such text, or those are not its classes.
    """
    try:
        return _plan_from(text, classes)
    except Exception as error:  # whatever a reader of malformed data may raise
        reason = str(error) if isinstance(error, LayoutError) else repr(error)
        raise LayoutError(f"this message describes no tree: {reason}") from error


@lru_cache(maxsize=256)
def _plan_from(text: str, classes: tuple[type, ...]) -> Plan:
    version, tree, runs = json.loads(text)
    if version != _VERSION:
        raise LayoutError(f"it is of version {version!r}, and this is a reader of {_VERSION}")
    for cls in classes:
        if not (isinstance(cls, type) and is_supported(cls)):
            raise LayoutError(f"{cls!r} is no class of a tree")
    skeleton = _skeleton_from(tree, classes)
    nodes, paths = parts_of(skeleton)
    plan = plan_of_rows(skeleton, list(_rows_from(paths, runs)), nodes)
    check_layout(plan.layout)
    return plan


def _skeleton_from(data: list[Any], classes: Sequence[type]) -> Any:
    number, batch_size, names, unbatched, keys, below = data
    (number,) = sizes_of([number])
    nested = tuple([(key, _skeleton_from(child, classes)) for key, child in below])
    return (
        classes[number],
        sizes_of(batch_size),
        None if names is None else tuple(names),
        frozenset(unbatched),
        tuple(keys),
        nested,
    )


def _rows_from(paths: Sequence[Path], runs: list[Any]) -> Iterator[Row]:
    checked = [(dtype, sizes_of(shape), *sizes_of([count])) for dtype, shape, count in runs]
    if sum(count for _, _, count in checked) != len(paths):  # before any of them is counted out
        raise LayoutError(f"it has {len(paths)} keys for another number of leaves")
    rest = iter(paths)
    for dtype, shape, count in checked:
        yield from [(next(rest), dtype, shape) for _ in range(count)]


@lru_cache(maxsize=256)
def plan_of_layout(layout: Layout) -> Plan:
    """A plan of the tree of a layout, its keys in the order of the buffer."""
    keys: dict[Path, list[str]] = {node.path: [] for node in layout.nodes}
    for leaf in layout.leaves:
        keys[leaf.path[:-1]].append(leaf.path[-1])
    below: dict[Path, list[Any]] = {node.path: [] for node in layout.nodes}
    skeletons: dict[Path, Any] = {}
    for node in reversed(layout.nodes):  # children before their parents
        nested = tuple(reversed(below[node.path]))
        skeletons[node.path] = (
            *(node.cls, node.batch_size, node.names),
            *(frozenset(node.unbatched), tuple(keys[node.path]), nested),
        )
        if node.path:
            below[node.path[:-1]].append((node.path[-1], skeletons[node.path]))
    nodes, paths = parts_of(skeletons[()])
    found = {leaf.path: leaf for leaf in layout.leaves}
    rows = [(path, found[path].dtype, found[path].shape) for path in paths]
    return plan_of_rows(skeletons[()], rows, nodes)
