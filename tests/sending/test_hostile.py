"""Messages that were cut off, put together wrongly, or lie."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdbridge import LayoutError, TdbridgeError, consolidate
from tdbridge.sending.arraydicts import rebuild_arraydict, reduce_arraydict
from tdbridge.sending.packed import rebuild_packed, reduce_packed
from tdbridge.sending.tensordicts import rebuild_tensordict, sent
from tests import zoo
from tests.pytrees.trees import arrays
from tests.sending.routes import aligned, out_of_band


def reduced(td: Any) -> Any:
    """The reduction of a tree, consolidated."""
    found = sent(consolidate(td))
    assert found is not None
    return found


def parts(kind: str) -> tuple[Any, list[Any]]:
    """The function of a message and its arguments, the buffer as plain bytes."""
    if kind == "TensorDict":
        rebuild, args = reduced(zoo.nested())
    elif kind == "ArrayDict":
        rebuild, args = reduce_arraydict(arrays("nested"))
    else:
        rebuild, args = reduce_packed(arrays("nested").pack())
    at = MEMORY[kind]
    args = list(args)
    args[at] = aligned(args[at].storage.numpy())
    return rebuild, args


MEMORY = {"TensorDict": 4, "ArrayDict": 3, "PackedArrayDict": 3}
KINDS = list(MEMORY)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_are_a_message(kind):
    """Else the tests below would prove nothing."""
    rebuild, args = parts(kind)
    assert rebuild in (rebuild_tensordict, rebuild_arraydict, rebuild_packed)
    assert rebuild(*args)["obs"].shape == (4, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [-64, -1, 1, 64])
def test_a_buffer_of_another_size_is_refused(kind, change):
    """Cut off or too long, both sizes are named."""
    rebuild, args = parts(kind)
    memory = args[MEMORY[kind]]
    size = memory.size + change
    args[MEMORY[kind]] = np.resize(memory, size)
    with pytest.raises(
        LayoutError, match=f"got a buffer of {size} bytes for a tree of {memory.size}"
    ):
        rebuild(*args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "memory",
    [None, "text", 7, [1, 2], torch.zeros(7), torch.zeros(8, 8, dtype=torch.uint8)],
    ids=repr,
)
def test_what_is_no_buffer_is_refused(kind, memory):
    """One clear error."""
    rebuild, args = parts(kind)
    args[MEMORY[kind]] = memory
    with pytest.raises(LayoutError, match="got a"):
        rebuild(*args)


def changed(text: str, change: Any) -> str:
    data = json.loads(text)
    change(data)
    return json.dumps(data)


CHANGES = {
    "another version": lambda d: d.__setitem__(0, 99),
    "a class too many": lambda d: d[1].__setitem__(0, 9),
    "a negative class": lambda d: d[1].__setitem__(0, -1),
    "no tree": lambda d: d.__setitem__(1, None),
    "a negative size": lambda d: d[2][0].__setitem__(1, [-4, 3]),
    "a size that is no number": lambda d: d[2][0].__setitem__(1, ["4", 3]),
    "a huge size": lambda d: d[2][0].__setitem__(1, [4, 2**62]),
    "another size": lambda d: d[2][0].__setitem__(1, [4, 300]),
    "an unknown dtype": lambda d: d[2][0].__setitem__(0, "object"),
    "a huge count": lambda d: d[2][0].__setitem__(2, 2**60),
    "a leaf too few": lambda d: d[2].pop(),
    "a batch size that no leaf has": lambda d: d[1].__setitem__(1, [5]),
    "a key twice": lambda d: d[1].__setitem__(4, ["obs", "obs"]),
    "a key that is no text": lambda d: d[1].__setitem__(4, [1]),
    "names of another length": lambda d: d[1].__setitem__(2, ["a", "b"]),
    "an unbatched leaf that is none": lambda d: d[1].__setitem__(3, ["nothing"]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_text_that_lies_is_refused(kind, name):
    """Nothing is allocated, viewed or built after it."""
    rebuild, args = parts(kind)
    args[0] = changed(args[0], CHANGES[name])
    with pytest.raises(LayoutError):
        rebuild(*args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "[" * 100_000, None, 3, b"[]", ["x"]], ids=lambda t: repr(t)[:9]
)
def test_what_is_no_text_is_refused(kind, text):
    """Malformed JSON, and what is none."""
    rebuild, args = parts(kind)
    args[0] = text
    with pytest.raises(LayoutError, match="describes no tree"):
        rebuild(*args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "classes", [(), (int,), ("TensorDict",), (print,), [TensorDict], None], ids=repr
)
def test_what_is_no_class_of_a_tree_is_refused(kind, classes):
    """It is looked at, never called."""
    rebuild, args = parts(kind)
    args[1] = classes
    with pytest.raises(LayoutError, match="describes no tree"):
        rebuild(*args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "values",
    [
        {("nowhere",): {"s": 1}},
        {(): {"obs": 1}},
        {(): {"next": 1}},
        {(): {1: 1, "a": 2}},
        {(): 5},
        7,
    ],
    ids=repr,
)
def test_values_of_no_place_are_refused(kind, values):
    """Of a node that is not there, under the name of a leaf or a nested tree, or no mapping."""
    rebuild, args = parts(kind)
    args[2] = values
    with pytest.raises(LayoutError, match="this message has"):
        rebuild(*args)


@pytest.mark.parametrize("at", [4, 5])
@pytest.mark.parametrize("marks", [[99], [-1], ["0"], [True], (0,), None], ids=repr)
def test_marks_of_no_leaf_are_refused(at, marks):
    """Which leaves are numpy's, and which are weak."""
    rebuild, args = parts("ArrayDict")
    args[at] = marks
    with pytest.raises(LayoutError, match="this message marks"):
        rebuild(*args)


def test_devices_of_no_node_are_refused():
    """There is one for each node, or none."""
    rebuild, args = parts("TensorDict")
    args[3] = [True] * 99
    with pytest.raises(LayoutError, match="of no node"):
        rebuild(*args)


@pytest.mark.parametrize("name", ["lazy", "jagged"])
def test_a_kind_without_its_parts_is_refused(name):
    """A stack without its dimension is none."""
    rebuild, args = reduced(zoo.KINDS[name]())
    values = {
        path: {k: v for k, v in own.items() if not k.endswith("_dim")}
        for path, own in args[2].items()
    }
    with pytest.raises(TdbridgeError):
        rebuild(*args[:2], values, *args[3:4], args[4].storage, *args[5:])


def test_a_pickle_that_was_cut_off_is_refused():
    """At any place, by pickle or by us."""
    data, buffers = out_of_band(consolidate(zoo.nested()))
    for stop in range(len(data)):
        with pytest.raises((pickle.UnpicklingError, EOFError, TdbridgeError)):
            pickle.loads(data[:stop], buffers=buffers)
