"""ArrayDict as a node of a tree: flattened, described, and built from a description."""

import dataclasses
from collections.abc import Iterator
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
    new = [
        (key, arraydict_of(value, leaves) if isinstance(value, Node) else next(leaves))
        for key, value in node.children
    ]
    return from_children(*define(dataclasses.replace(node, children=new)))


@node_of.register(ArrayDict)
def _arraydict_node(tree: ArrayDict) -> Node:
    definition, size = tree._definition, tree.batch_size
    names = definition.names_for(len(size))
    children: list[tuple[str, Any]] = list(zip(definition.keys, tree._children, strict=True))
    return Node(tree, definition.cls, size, names, definition.constants, children)
