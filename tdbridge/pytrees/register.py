"""TensorDict, its kin and ArrayDict as pytrees of JAX and optree.

The registration is ours and lawful: `unflatten(flatten(x))` is x, the definition of a tree does
not depend on its leaves, and unflatten takes anything at all for a leaf, since JAX hands it
tracers, None, shapes, shardings and bare objects. tensordict's own flatten functions, made for
torch, give wrong batch sizes under vmap and scan when JAX uses them.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import optree
import torch
from tensordict import TensorDict, is_tensorclass

from tdbridge._compat import tensordict as compat
from tdbridge._compat.optree import register_globally
from tdbridge.layout.classes import is_supported
from tdbridge.layout.tree import is_node, names_of, node_of
from tdbridge.pytrees.arraydict import ArrayDict, from_children
from tdbridge.pytrees.export import register_export
from tdbridge.pytrees.nodes import flatten_arraydict
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
    shapes = shapes_of(definition, children)
    if (size := common_size(definition, shapes)) is not None:
        children = sized_followers(definition, children, size, _resize)
    size = size or ()
    entries = dict(zip(definition.keys, children, strict=True))
    for key, value in definition.values.items():
        entries[key] = compat.non_tensor(value, size)
    names = definition.names_for(len(size))
    td = compat.new_tensordict(definition.cls, entries, batch_size=size, names=names)
    ranks_fit = all(len(shape) - own == len(size) for shape, own in shapes)
    if ranks_fit and names == definition.names and _all_torch(children):
        return td
    return _remember(td, definition, children)


# A tree of masks or shardings cannot tell how many batch dimensions its leaves would have had, a
# tree of norms has other ranks, and a tree inside vmap has lost its first name. All must flatten to
# the definition that they were made from, or `jax.tree.map(f, td, masks)` fails. So such a tree is
# locked and keeps it, together with what it was made of: changed since, it is described anew.


def _remember(td: Any, definition: NodeDef, children: Sequence[Any]) -> Any:
    compat.tensordict_of(td)._made_from = definition, children, td.batch_size, names_of(td)
    return td.lock_()


def _recall(td: Any) -> tuple[NodeDef, tuple[Any, ...]] | None:
    inner = compat.tensordict_of(td)
    made_from = getattr(inner, "_made_from", None)
    if made_from is None:
        return None
    definition, children, *size_and_names = made_from
    if size_and_names != [td.batch_size, names_of(td)]:
        return None
    now = dict(inner.items())
    was = dict(zip(definition.keys, children, strict=True))
    if now.keys() != was.keys() | definition.values.keys():
        return None
    same = all(now[key] is child for key, child in was.items()) and all(
        now[key].data is value for key, value in definition.values.items()
    )
    return (definition, children) if same else None


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
    compat.on_new_class(_register_tensordict)
    for cls in (TensorDict, *compat.defined_classes()):
        _register_tensordict(cls)


def _register_tensordict(cls: type) -> None:
    _register(cls, flatten_tensordict, unflatten_tensordict)
