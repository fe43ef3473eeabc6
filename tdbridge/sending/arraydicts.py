"""ArrayDicts in pickles: all arrays copied into one buffer, which JAX shares where it arrives."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from tdbridge.errors import LayoutError, LeafTypeError
from tdbridge.layout.plan import Plan, constants_of, plan_of
from tdbridge.layout.spec import Layout, Path
from tdbridge.layout.tree import leaves_of, tree_of
from tdbridge.pytrees.arraydict import ArrayDict, from_children
from tdbridge.pytrees.nodes import arraydict_of
from tdbridge.sending.arrays import (
    are_sendable,
    arrays_over,
    joined,
    numpy_at,
    weak_at,
)
from tdbridge.sending.memory import Whole, received, shared
from tdbridge.sending.nodes import Values, constants_in, described, values_of
from tdbridge.sending.text import plan_from, text_of

Hold = Callable[[Tensor], Any]
"""What becomes of the buffer: `Whole` in a pickle, `shared` in a queue of multiprocessing."""


def reduce_arraydict(tree: ArrayDict, hold: Hold = Whole, *, in_place: bool = False) -> Any:
    """How pickle reduces an ArrayDict: array by array where it cannot lie in one buffer.

    Args:
        tree: the ArrayDict.
        hold: what becomes of the buffer.
        in_place: what `rebuild_arraydict` is told.
    """
    return _reduction(tree, hold, in_place) or tree.__reduce__()


def forking_reduce_arraydict(tree: ArrayDict) -> Any:
    """How a queue does: the copy is shared memory, which the other process maps."""
    return reduce_arraydict(tree, shared)


def _reduction(tree: ArrayDict, hold: Hold, in_place: bool) -> Any | None:
    try:
        node = tree_of(tree)
        plan = plan_of(node)
        if not _is(tree, _template(plan)):
            return None
    except LeafTypeError:  # masks, keys, whatever else has no place in a buffer
        return None
    leaves = plan.placed(leaves_of(node))
    if not are_sendable(leaves):
        return None
    values = values_of(constants_of(node))
    memory = hold(joined(plan.layout, leaves))
    marks = numpy_at(leaves), weak_at(leaves)
    return rebuild_arraydict, (*text_of(plan), values, memory, *marks, in_place)


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a leaf of that shape: the `at`-th in the order of the layout."""

    at: int
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)


@lru_cache(maxsize=256)
def _template(plan: Plan) -> ArrayDict:
    """The tree of a plan without its values, a `_Place` for each leaf.

    Raises:
        LeafTypeError: it holds PRNG keys, as torch has them.
    """
    places = [_Place(i, plan.layout.leaves[i].shape) for i in plan.order]
    return arraydict_of(described(plan.skeleton, {}), iter(places))


def _is(tree: ArrayDict, template: ArrayDict) -> bool:
    """Whether a tree has the definitions that are made anew from its shapes and batch sizes.

    One that was mapped to arrays of other ranks has not.
    """
    one, other = tree._definition, template._definition
    return replace(one, constants=()) == other and all(
        _is(child, twin)
        for child, twin in zip(tree._children, template._children, strict=True)
        if type(child) is ArrayDict
    )


def rebuild_arraydict(
    text: str,
    classes: tuple[type, ...],
    values: Values,
    memory: Any,
    numpy: Collection[int],
    weak: Collection[int],
    in_place: bool = False,
) -> ArrayDict:
    """The ArrayDict of a message, its arrays over the one buffer.

    Args:
        text: what `text_of` says of the tree.
        classes: the classes that it counts.
        values: the non-tensor values.
        memory: the buffer, see `received`.
        numpy: which leaves, in the order of the layout, are numpy arrays.
        weak: which ones are arrays of a weak type.
        in_place: uses read-only memory for numpy arrays too, which are read-only then; jax arrays
            are so anyway.

    Raises:
        LayoutError: the parts of the message do not fit together.
    """
    plan = plan_from(text, classes)
    described(plan.skeleton, values)  # raises
    check_marks(numpy, plan.layout)
    check_marks(weak, plan.layout)
    storage = received(memory, plan.layout.nbytes, in_place=in_place or not numpy)
    array = storage.cpu().numpy()  # `map_location` of torch.load may have moved it
    if in_place:
        array.flags.writeable = False
    arrays = arrays_over(plan.layout, array, numpy, weak)
    return _filled(_template(plan), arrays, values, ())


def check_marks(places: Any, layout: Layout) -> None:
    """Checks that what a message marks are leaves that it has.

    Raises:
        LayoutError: they are not.
    """
    count = range(len(layout.leaves))
    if not (type(places) is list and all(type(i) is int and i in count for i in places)):
        raise LayoutError(f"this message marks {places!r:.80} of its {len(count)} leaves.")


def _filled(template: ArrayDict, arrays: list[Any], values: Values, path: Path) -> ArrayDict:
    definition = template._definition
    children = [
        arrays[child.at]
        if type(child) is _Place
        else _filled(child, arrays, values, (*path, definition.keys[i]))
        for i, child in enumerate(template._children)
    ]
    if own := values.get(path):
        definition = replace(definition, constants=constants_in(own))
    return from_children(definition, children)
