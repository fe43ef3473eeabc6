"""Which entries a tree has, and the same tree with others: read, replace, select, exclude."""

from collections.abc import Iterable, Mapping
from typing import Any

Key = str | tuple[str, ...]


def is_nested(value: Any) -> bool:
    """Whether an entry is an ArrayDict."""
    return hasattr(value, "_definition")


def pairs(tree: Any, include_nested: bool, leaves_only: bool) -> list[tuple[Any, Any]]:
    """(key, value) pairs sorted by key, those of nested trees after their own."""
    definition = tree._definition
    own: list[Any] = list(zip(definition.keys, tree._children, strict=True))
    if not leaves_only:
        own = sorted([*own, *definition.values.items()], key=lambda item: item[0])
    found: list[tuple[Any, Any]] = []
    for key, value in own:
        if not (is_nested(value) and leaves_only):
            found.append((key, value))
        if is_nested(value) and include_nested:
            inner = pairs(value, True, leaves_only)
            found += [((key, *((k,) if isinstance(k, str) else k)), v) for k, v in inner]
    return found


def replaced(tree: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `tree` with `changes`; a mapping is merged into a nested tree."""
    new: dict[str, Any] = dict(tree.items())
    for key, value in changes.items():
        old: Any = new.get(key)
        merge = isinstance(value, Mapping) and is_nested(old)
        new[key] = old.replace(value) if merge else value
    return new


def selected(tree: Any, keys: Iterable[Key], strict: bool) -> dict[str, Any]:
    """Only the entries at `keys`.

    Raises:
        KeyError: one is missing and `strict` is true.
    """
    groups = _grouped(keys)
    if strict:
        for key in keys:
            if key not in tree:
                raise KeyError(f"{key!r} is not among the keys {tree.keys(True)}")
    return {
        key: value if () in groups[key] else value.select(*groups[key], strict=strict)
        for key, value in tree.items()
        if key in groups and (() in groups[key] or is_nested(value))
    }


def excluded(tree: Any, keys: Iterable[Key]) -> dict[str, Any]:
    """All entries but those at `keys`."""
    groups = _grouped(keys)
    return {
        key: value.exclude(*groups[key]) if key in groups and is_nested(value) else value
        for key, value in tree.items()
        if () not in groups.get(key, ())
    }


def flattened(tree: Any, separator: str) -> dict[str, Any]:
    """One level: nested keys joined by `separator`.

    Raises:
        KeyError: two entries would get the same key.
    """
    flat: dict[str, Any] = {}
    for key, value in pairs(tree, True, False):
        if is_nested(value) and len(value):
            continue
        name = key if isinstance(key, str) else separator.join(key)
        if name in flat:
            raise KeyError(f"flattening gives the key {name!r} twice; use another separator.")
        flat[name] = value
    return flat


def _grouped(keys: Iterable[Key]) -> dict[str, list[tuple[str, ...]]]:
    """Each first key with the rests behind it; `()` is the entry itself."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for key in keys:
        head, *rest = (key,) if isinstance(key, str) else key
        groups.setdefault(head, []).append(tuple(rest))
    return groups
