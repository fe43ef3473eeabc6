"""Which entries a tree has, and the same tree with others: read, select, exclude, flatten.

The entries of a tree stand in one dict: leaves and nested trees as `Child`, non-tensor values as
`Constant`. So what is moved stays what it was, a mask or None in the place of a leaf included.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tdbridge.layout.constants import Constant
from tdbridge.layout.spec import Path, path_str
from tdbridge.pytrees.static import NodeDef, make_definition

Key = str | tuple[str, ...]
Make = Callable[[NodeDef, Sequence[Any]], Any]


class Child(NamedTuple):
    """A leaf or a nested tree, and how many of its last dimensions are event dimensions.

    None where it stands apart from the batch.
    """

    value: Any
    event_dims: int | None


Entries = dict[str, Child | Constant]


def is_nested(value: Any) -> bool:
    """Whether a child is an ArrayDict."""
    return "_definition" in getattr(type(value), "__slots__", ())


def entries_of(tree: Any) -> Entries:
    """All entries of one level, sorted by key."""
    definition = tree._definition
    children = map(Child, tree._children, definition.event_dims)
    own = [*zip(definition.keys, children, strict=True), *definition.constants]
    return dict(sorted(own, key=lambda item: item[0]))


def assemble(entries: Entries, like: NodeDef, make: Make) -> Any:
    """A tree over `entries`, with class, names and (where no leaf tells it) size of `like`."""
    pairs = sorted(entries.items(), key=lambda item: item[0])
    constants = tuple([(key, entry) for key, entry in pairs if isinstance(entry, Constant)])
    children = [(key, *entry) for key, entry in pairs if isinstance(entry, Child)]
    keys, values, dims = zip(*children, strict=True) if children else ((), (), ())
    trees = [i for i, value in enumerate(values) if is_nested(value)]
    like = replace(like, constants=constants)
    return make(make_definition(keys, dims, values, trees, like), values)


def pairs(tree: Any, include_nested: bool, leaves_only: bool) -> list[tuple[Any, Any]]:
    """(key, value) pairs sorted by key, those of nested trees after their own."""
    found: list[tuple[Any, Any]] = []
    for key, entry in entries_of(tree).items():
        nested = is_nested(entry.value)
        if not (leaves_only and (nested or isinstance(entry, Constant))):
            found.append((key, entry.value))
        if nested and include_nested:
            inner = pairs(entry.value, True, leaves_only)
            found += [((key, *((k,) if isinstance(k, str) else k)), v) for k, v in inner]
    return found


def nest(source: Mapping[Any, Any], path: Path = ()) -> dict[str, Any]:
    """`source` with tuple keys opened into nested dicts, one level of them.

    Raises:
        ValueError: a key is neither a string nor a tuple of strings, is given twice, or is both a
            leaf and a tree.
    """
    opened: dict[str, Any] = {}
    for key, value in source.items():
        parts = key_path(key, path)
        level = opened
        for depth, part in enumerate(parts[:-1]):
            inner = level.get(part, {})
            if not isinstance(inner, Mapping) or is_nested(inner):
                raise ValueError(f"{path_str((*path, *parts[: depth + 1]))} is a leaf and a tree.")
            level[part] = level = dict(inner)
        if parts[-1] in level:
            raise ValueError(f"{path_str((*path, *parts))} is given twice.")
        level[parts[-1]] = value
    return opened


def key_path(key: Any, path: Path = ()) -> Path:
    """A key as a tuple.

    Raises:
        ValueError: it is neither a string nor a tuple of strings.
    """
    parts = (key,) if isinstance(key, str) else key
    if not (isinstance(parts, tuple) and parts and all(isinstance(p, str) for p in parts)):
        where = f"{path_str(path)}: " if path else ""
        raise ValueError(f"{where}keys are strings or tuples of them, got {key!r}.")
    return parts


def selected(tree: Any, keys: Sequence[Key], strict: bool) -> Entries:
    """Only the entries at `keys`.

    Raises:
        KeyError: one is missing and `strict` is true.
    """
    groups = _grouped(keys)
    if strict and (missing := [key for key in keys if key not in tree]):
        raise KeyError(f"{missing[0]!r} is not among the keys {list(tree.keys(True))}")
    chosen: Entries = {}
    for key, entry in entries_of(tree).items():
        rests = groups.get(key, [])
        if () in rests:
            chosen[key] = entry
        elif rests and isinstance(entry, Child) and is_nested(entry.value):
            chosen[key] = Child(entry.value.select(*rests, strict=False), entry.event_dims)
    return chosen


def excluded(tree: Any, keys: Iterable[Key]) -> Entries:
    """All entries but those at `keys`."""
    left = entries_of(tree)
    for key, rests in _grouped(keys).items():
        entry = left.get(key)
        if () in rests:
            left.pop(key, None)
        elif isinstance(entry, Child) and is_nested(entry.value):
            left[key] = Child(entry.value.exclude(*rests), entry.event_dims)
    return left


def flattened(tree: Any, separator: str, event_dims: int = 0) -> Entries:
    """One level: nested keys joined by `separator`.

    Raises:
        KeyError: two entries would get the same key.
    """
    flat: Entries = {}
    for key, entry in entries_of(tree).items():
        named: Entries = {key: entry}
        if isinstance(entry, Child) and entry.event_dims is not None:
            dims = event_dims + entry.event_dims
            named = {key: Child(entry.value, dims)}
            if is_nested(entry.value) and len(entry.value):
                inner = flattened(entry.value, separator, dims)
                named = {f"{key}{separator}{k}": v for k, v in inner.items()}
        if twice := flat.keys() & named.keys():
            raise KeyError(f"flattening gives {sorted(twice)} twice; use another separator.")
        flat.update(named)
    return flat


def _grouped(keys: Iterable[Key]) -> dict[str, list[Path]]:
    """Each first key with the rests behind it; `()` is the entry itself."""
    groups: dict[str, list[Path]] = {}
    for key in keys:
        head, *rest = key_path(key)
        groups.setdefault(head, []).append(tuple(rest))
    return groups
