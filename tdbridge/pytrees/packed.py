"""PackedArrayDict: an ArrayDict in one flat array per dtype instead of one array per leaf."""

from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import jax
from tensordict import is_tensorclass

from tdbridge.errors import FrozenError, LeafTypeError
from tdbridge.layout.plan import constants_of, plan_of, with_own_constants
from tdbridge.layout.spec import Layout
from tdbridge.layout.tree import Node, leaves_of, node_of, paths_of, tree_of
from tdbridge.pytrees.arraydict import ArrayDict
from tdbridge.pytrees.joining import check_joined, is_deleted, joined
from tdbridge.pytrees.segments import Slot, slots_of, values_at


class PackedArrayDict(Mapping[str, Any]):
    """An ArrayDict whose leaves are slices of one flat array per dtype.

    A jitted function takes a few arrays instead of thousands, a transfer is one per dtype, and an
    elementwise step (`jax.tree.map(lambda p, g: p - g, packed, gradients)`) is one operation per
    dtype. It reads as an ArrayDict does; a leaf is sliced where it is read. It is a pytree of its
    segments, so that `jax.grad` gives gradients packed in the same way.

    `to_jax(td, packed=True)` and `ad.pack()` make one. It has no batch dimension to map over:
    inside of vmap or scan, reading a leaf raises. Call `unpack()` first.

    Attributes:
        segments: one flat array per dtype, sorted by its name: the leaves one after the other, in
            the order of their paths, with padding between them.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> packed = ArrayDict({"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}).pack()
        >>> packed["w"].shape, len(jax.tree.leaves(packed))
        ((3, 2), 1)
        >>> gradient = jax.grad(lambda p: (p["w"] ** 2).sum() + p["b"].sum())(packed)
        >>> gradient["w"][0].tolist(), gradient["b"].tolist()
        ([2.0, 2.0], [1.0, 1.0])
    """

    __slots__ = ("_layout", "segments")
    _layout: Layout
    segments: tuple[Any, ...]

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("use ad.pack() or tdbridge.to_jax(td, packed=True).")

    def unpack(self) -> ArrayDict:
        """The same tree with one array per leaf.

        Outside of jit, on one CPU device, the leaves share the memory of the segments and nothing
        is compiled. On another device each leaf is copied, by a program that is compiled once for
        leaves of one shape. Inside of jit all leaves of a segment are split off by one operation,
        whose gradient is one concatenation.

        Raises:
            ValueError: the segments were batched, by vmap or scan.
        """
        return self._filled(slots_of(self._layout))

    def __getitem__(self, index: Any) -> Any:
        """A leaf or a nested ArrayDict by key (`"a"`, `("a", "b")`).

        Any other index goes over the batch dimensions of every leaf, as on an ArrayDict.
        """
        parts = index if isinstance(index, tuple) and index else (index,)
        if all(isinstance(part, str) for part in parts):
            return self._filled(slots_of(self._layout)[parts])
        return self.unpack()[index]

    def __getattr__(self, name: str) -> Any:
        """The fields of a tensorclass; a field that is None is a missing key, as in torch."""
        if not name.startswith("_") and name in _fields(self.tensorclass):
            return self.get(name)
        raise AttributeError(
            f"PackedArrayDict has no attribute {name!r}: unpack() gives all that an ArrayDict has."
        )

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry at `key`, which may be a tuple, or `default`."""
        entry = slots_of(self._layout).get(key, _MISSING)
        return default if entry is _MISSING else self._filled(entry)

    def __contains__(self, key: object) -> bool:
        """Whether `key`, a string or a tuple of strings, is an entry."""
        return key in slots_of(self._layout)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        """The number of keys."""
        return len(slots_of(self._layout))

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> KeysView[Any]:
        """The keys, sorted: see `ArrayDict.items` for the arguments."""
        return slots_of(self._layout).keys(include_nested, leaves_only)

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> list[Any]:  # type: ignore[override]
        """(key, value) pairs, sorted by key: see `ArrayDict.items` for the arguments."""
        return self.unpack().items(include_nested, leaves_only)

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> list[Any]:  # type: ignore[override]
        """The values, in the order of the keys: see `ArrayDict.items` for the arguments."""
        return self.unpack().values(include_nested, leaves_only)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dicts of the unpacked arrays and the non-tensor values."""
        return self.unpack().to_dict()

    @property
    def batch_size(self) -> tuple[int, ...]:
        """The leading dimensions that all leaves share."""
        return slots_of(self._layout).batch_size

    shape = batch_size

    @property
    def names(self) -> list[str | None]:
        """A name or None per batch dimension."""
        return slots_of(self._layout).names

    @property
    def tensorclass(self) -> type:
        """The torch-side class that `to_torch` gives back."""
        return self._layout.nodes[0].cls

    def __repr__(self) -> str:
        def described(slot: Slot) -> Any:
            dtype = getattr(self.segments[slot.segment], "dtype", slot.dtype)
            return jax.ShapeDtypeStruct(slot.shape, dtype)

        return f"Packed{jax.tree.map(described, slots_of(self._layout))!r}"

    def __eq__(self, other: object) -> Any:
        """Elementwise, unpacked: an ArrayDict of booleans."""
        return self.unpack() == (other.unpack() if isinstance(other, PackedArrayDict) else other)

    def __ne__(self, other: object) -> Any:
        """Elementwise, unpacked: an ArrayDict of booleans."""
        return self.unpack() != (other.unpack() if isinstance(other, PackedArrayDict) else other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("the truth of a PackedArrayDict is ambiguous: use len(packed).")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise _frozen(key)

    def __delitem__(self, key: Any) -> None:
        raise _frozen(key)

    def __setattr__(self, name: str, value: Any) -> None:
        raise _frozen(name)

    def __delattr__(self, name: str) -> None:
        raise _frozen(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return over_segments, (self._layout, self.segments)

    def __copy__(self) -> "PackedArrayDict":
        return over_segments(self._layout, self.segments)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedArrayDict":
        return over_segments(*deepcopy((self._layout, self.segments), memo))

    def _filled(self, entry: Any) -> Any:
        """An entry of the tree of slots, with their values."""
        if isinstance(entry, Slot):
            return values_at(self.segments, [entry])[0]
        if isinstance(entry, ArrayDict):
            slots, treedef = jax.tree.flatten(entry)
            return jax.tree.unflatten(treedef, values_at(self.segments, slots))
        return entry


_MISSING = object()


def _fields(cls: Any) -> Iterable[str]:
    return cls.__dataclass_fields__ if is_tensorclass(cls) else ()


def _frozen(key: Any) -> FrozenError:
    return FrozenError(f"a PackedArrayDict is immutable, got {key!r}: change packed.unpack().")


def over_segments(layout: Layout, segments: Iterable[Any]) -> PackedArrayDict:
    """A packed tree over its segments, or over anything at all: nothing is checked."""
    new = object.__new__(PackedArrayDict)
    object.__setattr__(new, "_layout", layout)
    object.__setattr__(new, "segments", tuple(segments))
    return new


def packed(layout: Layout, segments: Sequence[Any]) -> PackedArrayDict:
    """A packed tree over the segments of a layout that describes it.

    Raises:
        LeafTypeError: it holds PRNG keys.
    """
    slots_of(layout)  # raises
    return over_segments(layout, segments)


def pack(tree: ArrayDict) -> PackedArrayDict:
    """Copies all leaves of an ArrayDict into one flat array per dtype: see `ArrayDict.pack`."""
    node = tree_of(tree)
    leaves = leaves_of(node)
    check_joined(leaves, paths_of(node))
    plan = plan_of(node)
    layout = with_own_constants(plan.layout, constants_of(node))
    return packed(layout, joined(layout, plan.placed(leaves)))


@node_of.register(PackedArrayDict)
def _packed_node(tree: PackedArrayDict) -> Node:
    if any(map(is_deleted, tree.segments)):
        raise LeafTypeError("got a PackedArrayDict that was deleted or donated.")
    return replace(node_of(tree.unpack()), source=tree)


@dataclass(frozen=True)
class SegmentKey:
    """A segment in a key path, as JAX prints it where vmap finds that sizes differ.

    Attributes:
        key: its dtype, by which our own errors name it; those of JAX ask each entry for a `key`.
    """

    key: str

    def __str__(self) -> str:
        return f".segments[{self.key!r}] (call .unpack() before vmap)"


def flatten_packed(tree: PackedArrayDict) -> tuple[tuple[Any, ...], Layout]:
    """For the pytree registries: the segments, and the rest."""
    return tree.segments, tree._layout


def keyed_segments(tree: PackedArrayDict) -> tuple[list[tuple[SegmentKey, Any]], Layout]:
    """As `flatten_packed`, with the key of each segment."""
    keys = [SegmentKey(segment.dtype) for segment in tree._layout.segments]
    return list(zip(keys, tree.segments, strict=True)), tree._layout
