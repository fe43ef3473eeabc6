"""An actor that gets and gives trees, and what lies in the object store of Ray."""

from pathlib import Path
from typing import Any

import jax

from tdbridge import ArrayDict, PackedArrayDict
from tests import zoo


class Worker:
    """What an actor does with a tree."""

    def echo(self, tree: Any) -> Any:
        return tree

    def make(self) -> Any:
        return zoo.nested()

    def seen(self, tree: Any) -> tuple[bool, bool, set[int], bool]:
        leaves = list(zoo.leaves(tree).values())
        storages = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        aligned = {leaf.data_ptr() % 64 for leaf in leaves}
        return tree.is_consolidated(), tree.is_locked, aligned, len(storages) == 1

    def sum(self, tree: Any) -> float:
        return float(jax.jit(lambda t: sum(leaf.sum() for leaf in jax.tree.leaves(t)))(tree))

    def mapped(self, tree: Any) -> bool:
        return in_object_store(places(tree))


def places(tree: Any) -> list[int]:
    if isinstance(tree, (ArrayDict, PackedArrayDict)):
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]
    return [leaf.data_ptr() for leaf in zoo.leaves(tree).values()]


def in_object_store(addresses: list[int]) -> bool:
    """Whether all of them are in memory that this process maps from the object store."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    store = [line[0].split("-") for line in lines if len(line) > 5 and "plasma" in line[5]]
    ranges = [range(int(low, 16), int(high, 16)) for low, high in store]
    return all(any(address in r for r in ranges) for address in addresses)
