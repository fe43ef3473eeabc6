"""Layout: where each leaf's bytes live, as frozen data and arithmetic.

The six rules (docs/design.md): leaves are grouped by dtype into segments; each leaf starts on a
multiple of 64 bytes; the order depends on paths, dtypes and shapes alone; padding is zero; a
segment is one flat array; a fingerprint is equal wherever the layout is.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from tdbridge.errors import LayoutError
from tdbridge.layout.classes import class_from_name, class_name
from tdbridge.layout.constants import Constant
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.validate import check_layout, read_data, sizes_of

ALIGNMENT = 64
"""Bytes. XLA's CPU client shares a buffer only when it starts on a multiple of 64."""

_VERSION = 1

Path = tuple[str, ...]


@dataclass(frozen=True)
class LeafSpec:
    """One leaf: its path, dtype name, shape, and first byte in the buffer."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes, padding excluded."""
        return self.numel * dtype_of(self.dtype).itemsize

    @property
    def stop(self) -> int:
        """The byte after the last one."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Segment:
    """All leaves of one dtype: bytes `offset` to `stop` of the buffer, as ONE flat array."""

    dtype: str
    offset: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Number of bytes, the padding between and after the leaves included."""
        return self.stop - self.offset


@dataclass(frozen=True)
class NodeSpec:
    """One tensordict of the tree, all but its tensors.

    Attributes:
        path: where it is; `()` is the root.
        cls: the torch-side class: TensorDict, a subclass of it, or a tensorclass.
        batch_size: its batch size.
        names: a name or None per batch dimension, or None when no dimension has one.
        constants: its non-tensor entries, sorted by key.
        unbatched: the keys of its leaves that do not start with the batch size, sorted.
    """

    path: Path
    cls: type
    batch_size: tuple[int, ...]
    names: tuple[str | None, ...] | None = None
    constants: tuple[tuple[str, Constant], ...] = ()
    unbatched: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The static description of a tree of tensors in one buffer.

    Frozen, hashable, and free of memory: two trees with the same paths, dtypes, shapes, batch
    sizes, names, classes and non-tensor values have equal layouts, whatever the order they were
    built in, the framework, the device or the process.

    Attributes:
        leaves: in the order of the buffer: by dtype name, then by path.
        nodes: the tensordicts, sorted by path, so that the root is the first.
    """

    leaves: tuple[LeafSpec, ...]
    nodes: tuple[NodeSpec, ...]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """One per dtype, in the order of the buffer."""
        return tuple(
            Segment(dtype, (group := list(leaves))[0].offset, padded(group[-1].stop))
            for dtype, leaves in groupby(self.leaves, key=lambda leaf: leaf.dtype)
        )

    @cached_property
    def nbytes(self) -> int:
        """Size of the buffer in bytes, padding included: a multiple of 64."""
        return padded(self.leaves[-1].stop) if self.leaves else 0

    @cached_property
    def fingerprint(self) -> str:
        """A digest of 64 hex digits, equal wherever the layout is equal."""
        text = json.dumps(self._as_data(lambda constant: constant.token), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _hash(self) -> int:
        return hash((self.leaves, self.nodes))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        # Without what is cached: a hash of text holds in one process only.
        return Layout, (self.leaves, self.nodes)

    def to_json(self) -> str:
        """The layout as JSON text, which `from_json` reads back.

        Raises:
            LayoutError: a non-tensor value has no JSON form; the error names it.
        """
        return json.dumps(self._as_data(Constant.to_json), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Layout":
        """Reads what `to_json` wrote.

        Nothing in the text is executed, and no module is imported: a class that it names must
        have been defined already. Offsets are computed anew, never trusted.

        Raises:
            LayoutError: the text is not a layout, or names a class that is not defined here.
        """
        try:
            return _from_text(text)
        except Exception as error:  # whatever a reader of malformed data may raise
            reason = str(error) if isinstance(error, LayoutError) else repr(error)
            raise LayoutError(f"this text is no layout: {reason}") from error

    def _as_data(self, constant: Any) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "leaves": [[leaf.path, leaf.dtype, leaf.shape] for leaf in self.leaves],
            "nodes": [_node_to_data(node, constant) for node in self.nodes],
        }


def make_layout(
    leaves: Iterable[tuple[Path, str, tuple[int, ...]]], nodes: Iterable[NodeSpec]
) -> Layout:
    """Gives each leaf, a (path, dtype name, shape), its place in the buffer."""
    offset, placed = 0, []
    for path, dtype, shape in sorted(leaves, key=lambda leaf: (leaf[1], leaf[0])):
        leaf = LeafSpec(path, dtype, shape, offset)
        offset = padded(leaf.stop)
        placed.append(leaf)
    return Layout(tuple(placed), tuple(sorted(nodes, key=lambda node: node.path)))


def first_difference(got: Layout, expected: Layout) -> str:
    """One line on where two layouts differ first."""
    for name in ("nodes", "leaves"):
        left, right = ({x.path: x for x in getattr(side, name)} for side in (got, expected))
        for path in sorted(left.keys() | right.keys()):
            one, other = left.get(path), right.get(path)
            if _without_place(one) != _without_place(other):
                return f"at {path_str(path)}: got {one}, expected {other}"
    return "none"


def _without_place(spec: Any) -> Any:
    """The place of a leaf follows from the leaves before it."""
    return replace(spec, offset=0) if isinstance(spec, LeafSpec) else spec


def padded(nbytes: int) -> int:
    """The bytes up to the next multiple of 64."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=4096)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a C-contiguous tensor, in elements."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _node_to_data(node: NodeSpec, constant: Any) -> list[Any]:
    values = {}
    for key, value in node.constants:
        try:
            values[key] = constant(value)
        except LayoutError as error:
            raise LayoutError(f"{path_str((*node.path, key))}: {error}") from None
    return [node.path, class_name(node.cls), node.batch_size, node.names, values, node.unbatched]


def _from_text(text: str) -> Layout:
    data = read_data(text, _VERSION)
    leaves = [(tuple(path), dtype, sizes_of(shape)) for path, dtype, shape in data["leaves"]]
    layout = make_layout(leaves, map(_node_from_data, data["nodes"]))
    check_layout(layout)
    # Whatever was read more loosely than it would have been written differs here.
    if json.dumps(data, sort_keys=True) != layout.to_json():
        raise LayoutError("it is not what to_json writes for any layout")
    return layout


def _node_from_data(data: list[Any]) -> NodeSpec:
    path, cls, batch_size, names, values, unbatched = data
    return NodeSpec(
        tuple(path),
        class_from_name(cls),
        sizes_of(batch_size),
        None if names is None else tuple(names),
        tuple((key, Constant.from_json(value)) for key, value in sorted(values.items())),
        tuple(unbatched),
    )


def path_str(path: Path) -> str:
    """The path as users write it: `['next', 'reward']`."""
    return repr(list(path))
