"""ArrayDict as a node of a tree: flattened, described, and built from a description."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tensordict import TensorDict

from tdbridge.errors import LeafTypeError
from tdbridge.layout.constants import Constant
from tdbridge.layout.kinds import check_whole
from tdbridge.layout.non_tensors import PerElement
from tdbridge.layout.spec import Path, path_str
from tdbridge.layout.tree import Node, node_of
from tdbridge.pytrees.arraydict import ArrayDict, from_children, resize
from tdbridge.pytrees.prng import PRNGKey, wrap_key
from tdbridge.pytrees.static import NodeDef, define, sized_followers


def flatten_arraydict(tree: ArrayDict) -> tuple[tuple[Any, ...], NodeDef]:
    """One level, for the pytree registries: the children sorted by key, and the rest."""
    definition = tree._definition
    return tuple(sized_followers(definition, tree._children, (), resize)), definition


def arraydict_of(node: Node, leaves: Iterator[Any], path: Path = ()) -> Any:
    """The tree that `tree_of` described, as ArrayDicts over other leaves, one per leaf of it.

    What torch holds of PRNG keys becomes an array of keys.

    Raises:
        LeafTypeError: JAX does not take it for keys; the error names its path.
    """
    own = list(islice(leaves, len(node.keys)))
    if node.cls is PRNGKey:
        return _keys(node, own, path)
    keys, nested = list(node.keys), []
    for key, child in node.nested:
        tree = arraydict_of(child, leaves, (*path, key))
        if isinstance(tree, ArrayDict):
            nested.append((key, tree))
        else:  # PRNG keys are a leaf here
            keys.append(key)
            own.append(tree)
    new = dataclasses.replace(node, keys=tuple(keys), leaves=own, nested=tuple(nested))
    return from_children(*define(new))


def _keys(node: Node, own: Sequence[Any], path: Path) -> Any:
    try:
        return wrap_key(*own, **{key: constant.value for key, constant in node.constants})
    except (TypeError, ValueError) as error:  # cast to floats, say, or of an unknown algorithm
        where = f"{path_str(path)}: " if path else ""
        raise LeafTypeError(f"{where}got a PRNGKey that is none in JAX: {error}") from error


@node_of.register(PRNGKey)
def _key_node(keys: PRNGKey) -> Node:
    """The same as of any tensorclass; keys that torch has stacked name their algorithm each."""
    node = node_of.dispatch(TensorDict)(keys)
    impl = dict(node.constants).get("impl")
    if impl is not None and isinstance(impl.value, PerElement):
        found = set(impl.value.array.flat)
        if len(found) != 1:
            raise LeafTypeError(
                f"got PRNG keys of {len(found)} algorithms, {sorted(found)}: an array has one."
            )
        node.constants = (("impl", Constant(*found)),)
    return node


@node_of.register(ArrayDict)
def _arraydict_node(tree: ArrayDict) -> Node:
    definition, size = tree._definition, tree.batch_size
    check_whole(definition.cls, definition.keys, definition.values)
    keys, leaves, nested = definition.keys, list(tree._children), ()
    if ArrayDict in set(map(type, leaves)):
        pairs = list(zip(keys, leaves, strict=True))
        nested = tuple([pair for pair in pairs if isinstance(pair[1], ArrayDict)])
        own = [pair for pair in pairs if not isinstance(pair[1], ArrayDict)]
        keys, leaves = tuple([key for key, _ in own]), [leaf for _, leaf in own]
    return Node(
        source=tree,
        cls=definition.cls,
        batch_size=size,
        names=definition.names_for(len(size)),
        constants=definition.constants,
        keys=keys,
        leaves=leaves,
        nested=nested,
        unbatched=definition.unbatched.intersection(keys),
    )
