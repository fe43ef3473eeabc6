"""Values that users give -> entries of an ArrayDict, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import torch
from tensordict import is_tensor_collection

from tdbridge.errors import LeafTypeError
from tdbridge.layout.constants import Constant
from tdbridge.layout.spec import Path, path_str
from tdbridge.pytrees.entries import Child, Entries, Make, assemble, entries_of, is_nested, nest
from tdbridge.pytrees.static import Names, NodeDef, is_apart


def build(source: Mapping[Any, Any], like: NodeDef, make: Make, path: Path = ()) -> Any:
    """An ArrayDict over `source`, of the batch size, names and class of `like`.

    Raises:
        LeafTypeError: a torch tensor or a TensorDict is among the values.
        ValueError: a key is no string, or a leaf does not start with the batch size.
    """
    opened = nest(_given(source, like, path), path)
    return assemble({k: entry(v, like, make, (*path, k)) for k, v in opened.items()}, like, make)


def _given(source: Any, like: NodeDef, path: Path) -> Mapping[Any, Any]:
    """What `source` holds; of an ArrayDict the non-tensor entries stay what they are.

    So do its children, if its batch size is that of `like`; else they are checked anew.
    """
    _refuse_torch(source, path)
    if not is_nested(source):
        return source
    same = source.batch_size == (like.batch_size or ())
    return {
        key: entry if same or isinstance(entry, Constant) else entry.value
        for key, entry in entries_of(source).items()
    }


def _refuse_torch(value: Any, path: Path) -> None:
    if isinstance(value, torch.Tensor) or is_tensor_collection(type(value)):
        where = f"{path_str(path)}: " if path else ""
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise LeafTypeError(f"{where}got a {kind}. Convert it with tdbridge.to_jax first.")


def entry(value: Any, like: NodeDef, make: Make, path: Path) -> Child | Constant:
    """One value as an entry of a node of the batch size and names of `like`."""
    if isinstance(value, (Child, Constant)):
        return value
    _refuse_torch(value, path)
    if hasattr(type(value), "unpack"):  # a packed tree
        value = value.unpack()
    if isinstance(value, Mapping) and not is_nested(value):
        inner = NodeDef(names=like.names, batch_size=like.batch_size)
        return Child(build(value, inner, make, path), 0)
    if isinstance(value, (bool, int, float, complex)):
        value = jnp.asarray(value)
    if not _has_shape(value):
        return Constant(value)
    if is_nested(value) and is_apart(value):
        return Child(value, None)
    shape: Any = getattr(value, "shape", ())
    size = like.batch_size or ()
    if tuple(shape[: len(size)]) != size:
        raise ValueError(
            f"{path_str(path)}: got shape {shape}, which does not start with batch_size {size}."
        )
    return Child(value, len(shape) - len(size))


def _has_shape(value: Any) -> bool:
    """Whether it is an array, a tree or a ShapeDtypeStruct; a numpy dtype has a shape too."""
    return is_nested(value) or (
        isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")
    )


def replaced(
    tree: Any,
    changes: Mapping[Any, Any],
    like: NodeDef,
    make: Make,
    path: Path = (),
    *,
    merge: bool = True,
) -> Entries:
    """The entries of `tree` with `changes`; if `merge`, a mapping is merged into a nested tree.

    What takes the place of a leaf that is no array (a mask, a PartitionSpec) is a leaf too, and
    an array in the place of an unbatched leaf is unbatched.
    """
    new = entries_of(tree)
    for key, value in nest(_given(changes, like, path), path).items():
        old, here = new.get(key), (*path, key)
        source = value.value if isinstance(value, Child) else value
        if not isinstance(old, Child):
            new[key] = entry(value, like, make, here)
        elif merge and isinstance(source, Mapping) and is_nested(old.value):
            merged = replaced(old.value, source, old.value._like(), make, here)
            new[key] = Child(old.value._with_entries(merged), old.event_dims)
        elif _has_shape(old.value) or isinstance(value, (Child, Constant, Mapping)):
            own = replace(like, batch_size=()) if _is_unbatched(old, value) else like
            new[key] = entry(value, own, make, here)
            if own is not like and isinstance(new[key], Child):
                new[key] = Child(new[key].value, None)
        else:
            new[key] = Child(value, old.event_dims)
    return new


def _is_unbatched(old: Child, value: Any) -> bool:
    leaf = old.event_dims is None and not is_nested(old.value)
    return leaf and not isinstance(value, (Child, Constant, Mapping))


def checked_names(names: Sequence[str | None] | None, size: tuple[int, ...]) -> Names | None:
    """One name or None per dimension of `size`; None where no dimension has a name.

    Raises:
        ValueError: there are more or fewer names than dimensions.
    """
    if names is None or all(name is None for name in names):
        return None
    if len(names) != len(size):
        raise ValueError(f"got {len(names)} names for batch_size {list(size)}.")
    return tuple(names)
