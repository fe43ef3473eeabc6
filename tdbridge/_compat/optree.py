"""optree: its default namespace, which has no public name."""

from typing import Any

import optree

# What `optree.tree_map(f, td)` looks in. Registration wants a namespace; without the constant a
# class registered under NAMESPACE is found by `optree.tree_map(f, td, namespace=NAMESPACE)`.
NAMESPACE = "tdbridge"
_GLOBAL = getattr(getattr(optree, "registry", None), "__GLOBAL_NAMESPACE", NAMESPACE)


def register_globally(cls: type, flatten: Any, unflatten: Any, entry: Any) -> None:
    """Registers `cls` in optree's default namespace.

    Raises:
        ValueError: it is registered there already.
    """
    optree.register_pytree_node(cls, flatten, unflatten, path_entry_type=entry, namespace=_GLOBAL)
