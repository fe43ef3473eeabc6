"""TensorDict, its kin and ArrayDict as pytrees of JAX and optree.

The registration is ours and lawful: `unflatten(flatten(x))` is x, the definition of a tree does
not depend on its leaves, and unflatten takes anything at all for a leaf, since JAX hands it
tracers, None, shapes, shardings and bare objects. tensordict's own flatten functions, made for
torch, give wrong batch sizes under vmap and scan when JAX uses them.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import optree
import torch
from jax import export
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    is_tensorclass,
)

from tdbridge._compat import tensordict as compat
from tdbridge._compat.optree import register_globally
from tdbridge.layout.classes import is_supported
from tdbridge.layout.non_tensors import entry_of
from tdbridge.layout.spec import Layout
from tdbridge.layout.tree import BUILDERS, is_node, names_of, node_of
from tdbridge.pytrees.arraydict import ArrayDict, from_children
from tdbridge.pytrees.export import register_export
from tdbridge.pytrees.nodes import flatten_arraydict
from tdbridge.pytrees.packed import (
    PackedArrayDict,
    flatten_packed,
    keyed_segments,
    over_segments,
)
from tdbridge.pytrees.static import NodeDef, common_size, define, shapes_of, sized_followers

_lock = threading.RLock()
_registered: set[type] = set()


def register(cls: type) -> type:
    """Registers a tensordict class as a pytree node in JAX and in optree; usable as a decorator.

    TensorDict, every tensorclass and every subclass of TensorDict are registered when tdbridge is
    imported or when they are defined, so this is seldom called by hand. It can be called again
    and from several threads. If another library has registered the class, its registration stays
    and a warning says so: the conversions of tdbridge do not depend on it.

    Args:
        cls: TensorDict, a subclass of it, or a tensorclass.

    Returns:
        `cls`.

    Raises:
        TypeError: `cls` is none of these.

    Example:
        >>> import jax, torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict(a=torch.zeros(3), b=TensorDict(c=torch.ones(2)))
        >>> [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(td)]
        ["['a']", "['b']['c']"]
    """
    if not (isinstance(cls, type) and is_supported(cls)) or compat.is_non_tensor_class(cls):
        raise TypeError(f"expected TensorDict, a subclass of it or a tensorclass, got {cls!r}.")
    _register_tensordict(cls)
    return cls


def _register(
    cls: type,
    flatten: Callable[[Any], tuple[tuple[Any, ...], NodeDef]],
    unflatten: Callable[[NodeDef, Iterable[Any]], Any],
) -> None:
    with _lock:
        if cls in _registered:
            return
        _registered.add(cls)
        _try(cls, "JAX", partial(_register_jax, cls, flatten, unflatten))
        _try(cls, "optree", partial(_register_optree, cls, flatten, unflatten))


def _try(cls: type, where: str, add: Callable[[], None]) -> None:
    try:
        add()
    except ValueError as error:  # both registries raise it for a class that is there already
        message = (
            f"{cls.__name__} is registered in {where} by another library ({error}); that stays."
        )
        warnings.warn(message, stacklevel=4)


def _register_jax(cls: type, flatten: Any, unflatten: Any) -> None:
    def flatten_with_keys(tree: Any) -> tuple[list[Any], NodeDef]:
        children, definition = flatten(tree)
        keys = map(jax.tree_util.DictKey, definition.keys)
        return list(zip(keys, children, strict=True)), definition

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    register_export(cls, f"tdbridge.{cls.__module__}.{cls.__qualname__}")


def _register_optree(cls: type, flatten: Any, unflatten: Any) -> None:
    def flatten_with_entries(tree: Any) -> tuple[Any, NodeDef, tuple[str, ...]]:
        children, definition = flatten(tree)
        return children, definition, definition.keys

    entry = optree.GetAttrEntry if is_tensorclass(cls) else optree.MappingEntry
    register_globally(cls, flatten_with_entries, unflatten, entry)


def flatten_tensordict(td: Any) -> tuple[tuple[Any, ...], NodeDef]:
    """One level: the children sorted by key, and the rest."""
    definition, children = _recall(td) or define(node_of(td))
    return tuple(sized_followers(definition, children, (), _resize)), definition


def unflatten_tensordict(definition: NodeDef, children: Iterable[Any]) -> Any:
    """A TensorDict (or its kin) over any leaves; locked unless they are tensors of its ranks."""
    children = tuple(children)
    fits = _all_torch(children)
    shapes = shapes_of(definition, children)
    if (size := common_size(definition, shapes)) is not None:
        children = sized_followers(definition, children, size, _resize)
    if definition.cls in BUILDERS:
        return _build(definition, children, fits)
    size = size or ()
    names = definition.names_for(len(size))
    ranks_fit = all(len(shape) - own == len(size) for shape, own in shapes)
    fits = fits and ranks_fit and names == definition.names
    entries = _entries(definition, children, size)
    td = compat.new_tensordict(definition.cls, entries, batch_size=size, names=names)
    return td if fits else _remember(td, definition, children)


def _entries(definition: NodeDef, children: Sequence[Any], size: tuple[int, ...]) -> dict[str, Any]:
    entries = dict(zip(definition.keys, children, strict=True))
    for key, value in definition.values.items():
        entries[key] = entry_of(value, size)
    for key in definition.unbatched:
        if type(entries[key]) is torch.Tensor:
            entries[key] = UnbatchedTensor(entries[key], batch_size=size)
    return entries


def _build(definition: NodeDef, children: Sequence[Any], fits: bool) -> Any:
    """A lazy stack, also of what it cannot stack: JAX takes trees of one class alone for alike."""
    entries = dict(zip(definition.keys, children, strict=True))
    dim = definition.values["stack_dim"]
    for at in (dim, 0) if all(map(is_node, children)) else ():
        with contextlib.suppress(RuntimeError, IndexError):  # a dimension was taken away
            stack = BUILDERS[definition.cls](entries | definition.values | {"stack_dim": at})
            return stack if fits and at == dim else _remember(stack, definition, children)
    td = compat.new_tensordict(TensorDict, entries, batch_size=())
    return _remember(td, definition, children)


# A tree of masks or shardings cannot tell how many batch dimensions its leaves would have had, a
# tree of norms has other ranks, and a tree inside vmap has lost its first name. All must flatten to
# the definition that they were made from, or `jax.tree.map(f, td, masks)` fails. So such a tree is
# locked and keeps it, together with what it was made of: changed since, it is described anew.


def _remember(td: Any, definition: NodeDef, children: Sequence[Any]) -> Any:
    inner: Any = compat.tensordict_of(td)
    inner._made_from = definition, children, _entries_now(inner), td.batch_size, names_of(td)
    return td.lock_()


def _recall(td: Any) -> tuple[NodeDef, tuple[Any, ...]] | None:
    inner = compat.tensordict_of(td)
    made_from = getattr(inner, "_made_from", None)
    if made_from is None:
        return None
    definition, children, was, *size_and_names = made_from
    if size_and_names != [td.batch_size, names_of(td)]:
        return None
    now = _entries_now(inner)
    same = now.keys() == was.keys() and all(now[key] is entry for key, entry in was.items())
    return (definition, children) if same else None


def _entries_now(inner: Any) -> dict[str, Any]:
    if isinstance(inner, LazyStackedTensorDict):
        return {str(i): member for i, member in enumerate(inner.tensordicts)}
    return dict(inner.items())


def _all_torch(children: Sequence[Any]) -> bool:
    return set(map(type, children)) == {torch.Tensor} or all(
        isinstance(child, torch.Tensor) or (is_node(child) and not child.is_locked)
        for child in children
    )


def _resize(td: Any, size: tuple[int, ...]) -> Any:
    """A nested tensordict without leaves, of another batch size."""
    children, definition = flatten_tensordict(td)
    return unflatten_tensordict(definition.resized(size, definition.names), children)


def register_all() -> None:
    """Registers ArrayDict, TensorDict, and every tensorclass there is and will be."""
    _register(ArrayDict, flatten_arraydict, from_children)
    _register_packed()
    compat.on_new_class(_register_tensordict)
    for cls in (TensorDict, LazyStackedTensorDict, TensorDictParams, *compat.defined_classes()):
        _register_tensordict(cls)


class SegmentEntry(optree.PyTreeEntry):
    """A segment in a path of optree: `packed[0]` is an element of the batch."""

    __slots__ = ()

    def __call__(self, obj: PackedArrayDict, /) -> Any:
        """The segment."""
        return obj.segments[self.entry]

    def codify(self, /, node: str = "") -> str:
        """How it is written in Python."""
        return f"{node}.segments[{self.entry!r}]"


def _register_packed() -> None:
    cls = PackedArrayDict
    jax.tree_util.register_pytree_with_keys(cls, keyed_segments, over_segments, flatten_packed)
    register_globally(cls, flatten_packed, over_segments, SegmentEntry)
    export.register_pytree_node_serialization(
        cls,
        serialized_name="tdbridge.PackedArrayDict",
        serialize_auxdata=lambda layout: layout.to_json().encode(),
        deserialize_auxdata=lambda data: Layout.from_json(bytes(data).decode()),
    )


def _register_tensordict(cls: type) -> None:
    _register(cls, flatten_tensordict, unflatten_tensordict)
