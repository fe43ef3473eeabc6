"""ArrayDict: the JAX twin of TensorDict."""

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
from tensordict import LazyStackedTensorDict, is_tensorclass

from tdbridge.errors import FrozenError
from tdbridge.layout.spec import path_str
from tdbridge.pytrees import entries, shaping
from tdbridge.pytrees.build import build, checked_names, replaced
from tdbridge.pytrees.compare import compared
from tdbridge.pytrees.entries import Key
from tdbridge.pytrees.show import describe
from tdbridge.pytrees.static import NodeDef, derive_batch_size, sized_followers

if TYPE_CHECKING:
    from tdbridge.pytrees.packed import PackedArrayDict


class ArrayDict(Mapping[str, Any]):
    """An immutable, nested mapping of arrays that share leading batch dimensions.

    It is a pytree in JAX and optree, with key paths such as `['next']['reward']`, and has
    TensorDict's vocabulary. Each leaf keeps how many of its last dimensions are event dimensions;
    `batch_size` is derived from the leaves' shapes, so it is right inside vmap, scan and
    shard_map, and after stacking.

    As a Mapping, iteration and `len` go over the keys (a TensorDict iterates over its batch).

    Args:
        source: nested mappings of arrays. jax and numpy arrays, tracers and ShapeDtypeStructs are
            kept as they are, uncopied; Python numbers become jax arrays; anything else (a string,
            None, a list) is a non-tensor entry.
        batch_size: the leading dimensions that all leaves share.
        names: a name or None for each batch dimension.

    Raises:
        LeafTypeError: a torch tensor or a TensorDict is among the values (see `to_jax`).
        ValueError: a leaf does not start with `batch_size`, a key is no string, or `names` has
            another length than `batch_size`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> ad = ArrayDict({"obs": jnp.zeros((4, 3)), "next": {"reward": jnp.ones(4)}}, [4])
        >>> ad["next", "reward"].shape, ad[0]["obs"].shape, ad[:2].batch_size
        ((4,), (3,), (2,))
        >>> jax.vmap(lambda row: row["obs"].sum() + row["next", "reward"])(ad).shape
        (4,)
    """

    __slots__ = ("_children", "_definition")
    _children: tuple[Any, ...]
    _definition: NodeDef

    def __init__(
        self,
        source: Mapping[str, Any] | None = None,
        batch_size: Sequence[int] | int = (),
        *,
        names: Sequence[str | None] | None = None,
    ) -> None:
        size = (batch_size,) if isinstance(batch_size, int) else tuple(map(int, batch_size))
        like = NodeDef(names=checked_names(names, size), batch_size=size)
        built = build({} if source is None else source, like, from_children)
        _init(self, built._definition, built._children)

    # -- reading -------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """A leaf or nested ArrayDict by key (`"a"`, `("a", "b")`), or the tree indexed.

        Any other index goes over the batch dimensions of every leaf, as on a TensorDict.
        """
        if isinstance(index, str):
            return self._child(index)
        if isinstance(index, tuple) and index and all(isinstance(part, str) for part in index):
            return _descend(self, index)
        return shaping.index(self, index)

    def _child(self, key: str) -> Any:
        position = self._definition.index.get(key)
        if position is not None:
            return self._children[position]
        values = self._definition.values
        if key in values:
            return values[key]
        raise KeyError(f"{key!r} is not among the keys {list(self.keys())}{_advice(self, key)}")

    def __getattr__(self, name: str) -> Any:
        """The fields of a tensorclass; a field that is None is a missing key, as in torch."""
        if not name.startswith("_") and is_tensorclass(cls := self._definition.cls):
            if name in self:
                return self._child(name)
            if name in cls.__dataclass_fields__:
                return None
        raise AttributeError(
            f"ArrayDict has no attribute {name!r}: read entries by ad[{name!r}], change them by "
            "ad.replace(...)."
        )

    def get(self, key: Key, default: Any = None) -> Any:
        """The entry at `key`, which may be a tuple, or `default`."""
        parts = (key,) if isinstance(key, str) else key
        try:
            return _descend(self, parts) if isinstance(parts, tuple) and parts else default
        except KeyError:
            return default

    def __contains__(self, key: object) -> bool:
        """Whether `key`, a string or a tuple of strings, is an entry."""
        return self.get(key, _MISSING) is not _MISSING  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._definition.keys) + len(self._definition.constants)

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> list[Any]:  # type: ignore[override]
        """(key, value) pairs, sorted by key.

        Args:
            include_nested: also those of nested ArrayDicts, under tuple keys.
            leaves_only: only arrays: no nested ArrayDict and no non-tensor entry.
        """
        return entries.pairs(self, include_nested, leaves_only)

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> KeysView[Any]:
        """The keys, sorted; see `items` for the arguments."""
        return dict(self.items(include_nested, leaves_only)).keys()

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> list[Any]:  # type: ignore[override]
        """The values, in the order of the keys; see `items` for the arguments."""
        return [value for _, value in self.items(include_nested, leaves_only)]

    @property
    def batch_size(self) -> tuple[int, ...]:
        """The leading dimensions that all leaves share, derived from their shapes."""
        return derive_batch_size(self._definition, self._children) or ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The same as `batch_size`."""
        return self.batch_size

    @property
    def batch_dims(self) -> int:
        """The number of batch dimensions."""
        return len(self.batch_size)

    ndim = batch_dims

    @property
    def names(self) -> list[str | None]:
        """A name or None per batch dimension.

        All None while a transformation (vmap, scan) has changed the number of batch dimensions.
        JAX does not say which dimension vmap took or where it put it back: after a vmap whose
        `out_axes` are not its `in_axes`, the names stand in the old order.
        """
        dims = self.batch_dims
        return list(self._definition.names_for(dims) or (None,) * dims)

    @property
    def tensorclass(self) -> type:
        """The torch-side class that `to_torch` gives back."""
        return self._definition.cls

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dicts of the same arrays and non-tensor values; nothing is copied."""
        return {k: v.to_dict() if isinstance(v, ArrayDict) else v for k, v in self.items()}

    def __repr__(self) -> str:
        return describe(self)

    # -- the same tree with other entries ----------------------------------------------------

    def replace(self, source: Mapping[Any, Any] | None = None, /, **changes: Any) -> Self:
        """A new ArrayDict with some entries set: replaced where they exist, else added.

        Keys may be tuples; a mapping is merged into the nested ArrayDict that is there. The
        arrays that are not named are shared, not copied.

        Example:
            >>> import jax.numpy as jnp
            >>> ad = ArrayDict({"x": jnp.zeros(2)}, [2])
            >>> sorted(ad.replace(x=jnp.ones(2), y=jnp.ones((2, 3))).keys())
            ['x', 'y']
        """
        both = {**(source or {}), **changes}
        return self._with_entries(replaced(self, both, self._like(), from_children))

    def select(self, *keys: Key, strict: bool = True) -> Self:
        """Only these entries (tuple keys reach into nested ones).

        Raises:
            KeyError: a key is missing and `strict` is true.
        """
        return self._with_entries(entries.selected(self, keys, strict))

    def exclude(self, *keys: Key) -> Self:
        """All entries but these; keys that do not exist are ignored."""
        return self._with_entries(entries.excluded(self, keys))

    def flatten_keys(self, separator: str = ".") -> Self:
        """One level: nested keys joined by `separator`.

        Raises:
            KeyError: two entries would get the same key.
        """
        return self._with_entries(entries.flattened(self, separator))

    def unflatten_keys(self, separator: str = ".") -> Self:
        """Nested: keys split at `separator`.

        Raises:
            ValueError: a key would be both a leaf and a nested tree.
        """
        split = {tuple(k.split(separator)): v for k, v in entries.entries_of(self).items()}
        return build(split, self._like(), from_children)

    def __or__(self, other: Mapping[str, Any]) -> Self:
        """The entries of both; those of `other` win. Nested trees are replaced, not merged."""
        if not isinstance(other, Mapping):
            return NotImplemented
        new = replaced(self, other, self._like(), from_children, merge=False)
        return self._with_entries(new)

    # -- the same keys with other leaves --------------------------------------------------------

    def map(self, function: Callable[..., Any], *others: "ArrayDict") -> Self:
        """Applies `function` to every leaf (and to the same leaf of `others`).

        The same as `jax.tree.map`: batch size and names follow the new leaves' shapes.
        """
        return jax.tree.map(function, self, *others)

    def reshape(self, *shape: int | Sequence[int]) -> Self:
        """Reshapes the batch dimensions; event dimensions stay. One size may be -1."""
        first: Any = shape[0] if shape and isinstance(shape[0], Sequence) else shape
        return shaping.reshape(self, tuple(first))

    def pack(self) -> "PackedArrayDict":
        """The same tree in one flat array per dtype: see `PackedArrayDict`.

        All leaves are copied. On the CPU, outside of jit, nothing is compiled; elsewhere a program
        is, once for each structure.

        Raises:
            LeafTypeError: a leaf is no array (a mask, None, a PRNG key), or the leaves do not lie
                on one device.
            NarrowingError: a numpy leaf of 64 bits, while x64 is off.
        """
        from tdbridge.pytrees.packed import pack  # it is made of ArrayDicts

        return pack(self)

    @classmethod
    def stack(cls, trees: Iterable[Any], dim: int = 0) -> Self:
        """Stacks ArrayDicts of equal structure and batch size along a new batch dimension.

        Raises:
            ValueError: there is nothing to stack, structures differ, or `dim` is out of range.
        """
        return shaping.stack(trees, dim)

    @classmethod
    def cat(cls, trees: Iterable[Any], dim: int = 0) -> Self:
        """Concatenates ArrayDicts of equal structure along an existing batch dimension.

        Raises:
            ValueError: there is nothing to join, structures differ, or `dim` is out of range.
        """
        return shaping.cat(trees, dim)

    def __eq__(self, other: object) -> Any:
        """Elementwise, as on a TensorDict: an ArrayDict of booleans; see `all` and `any`."""
        return compared(self, other, lambda a, b: a == b, from_children)

    def __ne__(self, other: object) -> Any:
        """Elementwise: an ArrayDict of booleans."""
        return compared(self, other, lambda a, b: a != b, from_children)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("the truth of an ArrayDict is ambiguous: use .all(), .any() or len(ad).")

    def all(self) -> Any:
        """Whether all elements of all leaves are true: a boolean jax array."""
        return jnp.all(jnp.asarray([jnp.all(leaf) for leaf in self.values(True, True)]))

    def any(self) -> Any:
        """Whether any element of any leaf is true: a boolean jax array."""
        leaves = [jnp.any(leaf) for leaf in self.values(True, True)]
        return jnp.any(jnp.asarray(leaves, dtype=bool))

    # -- immutability ------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: Any) -> None:
        raise FrozenError(f"an ArrayDict is immutable: use ad.replace({{{key!r}: ...}}).")

    def __delitem__(self, key: Any) -> None:
        raise FrozenError(f"an ArrayDict is immutable: use ad.exclude({key!r}).")

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenError(
            f"an ArrayDict is immutable: use ad.replace(...) for other entries, got {name!r}."
        )

    def __delattr__(self, name: str) -> None:
        raise FrozenError(f"an ArrayDict is immutable: use ad.exclude({name!r}).")

    def __reduce__(self) -> tuple[Any, ...]:
        return from_children, (self._definition, self._children)

    def __copy__(self) -> "ArrayDict":
        return from_children(self._definition, self._children)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ArrayDict":
        return from_children(*deepcopy((self._definition, self._children), memo))

    # -- building ------------------------------------------------------------------------------

    def _like(self) -> NodeDef:
        """The class, names and batch size, for a tree over other entries."""
        old = self._definition
        return NodeDef(cls=old.cls, names=old.names, batch_size=self.batch_size)

    def _with_entries(self, new: Mapping[str, Any]) -> Self:
        return entries.assemble(dict(new), self._like(), from_children)

    @staticmethod
    def _make(definition: NodeDef, children: Iterable[Any]) -> "ArrayDict":
        return from_children(definition, children)


_MISSING = object()


def _advice(tree: ArrayDict, key: str) -> str:
    """How to read an entry of the members of a lazy stack, by the key that it has there."""
    if tree.tensorclass is not LazyStackedTensorDict:
        return ""
    return (
        f" of a lazy stack: read a member, ad['0', {key!r}], or stack the members first, "
        f"ArrayDict.stack(members, dim)[{key!r}]"
    )


def _init(self: ArrayDict, definition: NodeDef, children: Iterable[Any]) -> None:
    object.__setattr__(self, "_definition", definition)
    object.__setattr__(self, "_children", tuple(children))


def from_children(definition: NodeDef, children: Iterable[Any]) -> ArrayDict:
    """An ArrayDict over any children at all: arrays, tracers, None, masks. Nothing is checked."""
    children = tuple(children)
    if definition.followers and (size := derive_batch_size(definition, children)) is not None:
        children = sized_followers(definition, children, size, resize)
    new = object.__new__(ArrayDict)
    _init(new, definition, children)
    return new


def resize(tree: ArrayDict, size: tuple[int, ...]) -> ArrayDict:
    """`tree`, which has no leaf, with another batch size."""
    old = tree._definition
    return from_children(old.resized(size, old.names), tree._children)


def _descend(tree: Any, path: Sequence[str]) -> Any:
    for depth, key in enumerate(path):
        if not isinstance(tree, ArrayDict):
            raise KeyError(f"{path_str(tuple(path[:depth]))} is a leaf and has no key {key!r}")
        tree = tree._child(key)
    return tree
