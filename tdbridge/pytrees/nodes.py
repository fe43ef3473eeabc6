"""ArrayDict as a node of a tree: flattened, described, and built from a description."""

import dataclasses
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tdbridge.layout.tree import Node, node_of
from tdbridge.pytrees.arraydict import ArrayDict, from_children, resize
from tdbridge.pytrees.static import NodeDef, define, sized_followers


def flatten_arraydict(tree: ArrayDict) -> tuple[tuple[Any, ...], NodeDef]:
    """One level, for the pytree registries: the children sorted by key, and the rest."""
    definition = tree._definition
    return tuple(sized_followers(definition, tree._children, (), resize)), definition


def arraydict_of(node: Node, leaves: Iterator[Any]) -> ArrayDict:
    """The tree that `tree_of` described, as ArrayDicts over other leaves, one per leaf of it."""
    own = list(islice(leaves, len(node.keys)))
    nested = tuple([(key, arraydict_of(child, leaves)) for key, child in node.nested])
    return from_children(*define(dataclasses.replace(node, leaves=own, nested=nested)))


@node_of.register(ArrayDict)
def _arraydict_node(tree: ArrayDict) -> Node:
    definition, size = tree._definition, tree.batch_size
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
    )
