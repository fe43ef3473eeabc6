"""PackedArrayDicts in pickles: their segments behind one another in one buffer."""

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.plan import with_own_constants
from tdbridge.layout.spec import Layout, NodeSpec, make_layout
from tdbridge.pytrees.packed import PackedArrayDict, packed
from tdbridge.sending.arraydicts import Hold, check_marks
from tdbridge.sending.arrays import are_sendable, arrays_over, joined, numpy_at, weak_at
from tdbridge.sending.memory import Whole, received, shared
from tdbridge.sending.nodes import Values, constants_in, described, values_of
from tdbridge.sending.text import plan_from, plan_of_layout, text_of


def reduce_packed(tree: PackedArrayDict, hold: Hold = Whole) -> Any:
    """How pickle reduces a packed tree: array by array where its segments are of other kinds."""
    return _reduction(tree, hold) or tree.__reduce__()


def forking_reduce_packed(tree: PackedArrayDict) -> Any:
    """How a queue does: the copy is shared memory, which the other process maps."""
    return reduce_packed(tree, shared)


def _reduction(tree: PackedArrayDict, hold: Hold) -> Any | None:
    plan = plan_of_layout(_bare(tree._layout))
    flat = _segments_of(plan.layout)
    wanted = [(dtype_of(leaf.dtype).numpy, leaf.shape) for leaf in flat.leaves]
    found = [(getattr(s, "dtype", None), getattr(s, "shape", None)) for s in tree.segments]
    # Segments can be anything, of other dtypes and of another length.
    if found != wanted or not are_sendable(tree.segments) or numpy_at(tree.segments):
        return None
    values = values_of([(n.path, n.constants) for n in tree._layout.nodes if n.constants])
    memory = hold(joined(flat, tree.segments))
    return rebuild_packed, (*text_of(plan), values, memory, weak_at(tree.segments))


def _bare(layout: Layout) -> Layout:
    """The layout without non-tensor values."""
    if not any(node.constants for node in layout.nodes):
        return layout
    return Layout(layout.leaves, tuple([replace(node, constants=()) for node in layout.nodes]))


@lru_cache(maxsize=256)
def _segments_of(layout: Layout) -> Layout:
    """The same buffer, with a leaf for each segment."""
    rows = [
        ((s.dtype,), s.dtype, (s.nbytes // dtype_of(s.dtype).itemsize,)) for s in layout.segments
    ]
    root = layout.nodes[0]
    return make_layout(rows, [NodeSpec((), root.cls, ())])


def rebuild_packed(
    text: str,
    classes: tuple[type, ...],
    values: Values,
    memory: Any,
    weak: Collection[int],
) -> PackedArrayDict:
    """The packed tree of a message, its segments over the one buffer.

    Args:
        text: what `text_of` says of the tree.
        classes: the classes that it counts.
        values: the non-tensor values.
        memory: the buffer, see `received`.
        weak: which segments are arrays of a weak type.

    Raises:
        LayoutError: the parts of the message do not fit together.
    """
    plan = plan_from(text, classes)
    described(plan.skeleton, values)  # raises
    flat = _segments_of(plan.layout)
    check_marks(weak, flat)
    storage = received(memory, flat.nbytes, in_place=True)
    arrays = arrays_over(flat, storage.cpu().numpy(), (), weak)
    constants = tuple(sorted([(path, constants_in(own)) for path, own in values.items()]))
    return packed(with_own_constants(plan.layout, constants), arrays)
