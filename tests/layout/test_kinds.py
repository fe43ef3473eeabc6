"""Layouts and buffers of trees that are no dict of tensors of one batch."""

import io
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    PersistentTensorDict,
    TensorDict,
    UnbatchedTensor,
    is_non_tensor,
    is_tensor_collection,
)

from tdbridge import Layout, LayoutError, LeafTypeError, consolidate, layout_of, to_jax, to_torch
from tests import zoo

ROOT = Path(__file__).parents[2]
PACKED = [name for name in zoo.KINDS if name not in ("unbatched", "lazy_of_tensorclasses")]
"""What a consolidated tensordict can be."""
IN_FILES = [name for name in PACKED if name != "values_per_element"]
"""What its file can hold: the other one has an array among its values, which JSON has not."""


def packed(name: str) -> Any:
    """A tree as it is once consolidated: parameters are a TensorDict, as in stock."""
    tree = zoo.KINDS[name]()
    return tree.to_tensordict() if name.startswith("params") else tree


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """All memory that a tree has, read by public API."""
    if is_non_tensor(tree):
        return
    if is_tensor_collection(tree):
        lazy = isinstance(tree, LazyStackedTensorDict)
        for part in tree.tensordicts if lazy else [tree.get(key) for key in tree.keys()]:  # noqa: SIM118
            yield from tensors(part)
    elif tree.is_nested:
        parts = tree.values(), tree.offsets(), tree.lengths()
        yield from (part for part in parts if part is not None)
    else:
        yield tree


def assert_packed(found: Any, name: str) -> None:
    """It is the tree, in one buffer, aligned."""
    assert zoo.described(found) == zoo.described(packed(name))
    leaves = list(tensors(found))
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) <= 1
    assert not any(leaf.data_ptr() % 64 for leaf in leaves)
    assert all(leaf.is_contiguous() for leaf in leaves)
    assert found.is_locked


# --- layouts


@pytest.mark.parametrize("name", zoo.KINDS)
def test_a_layout_is_equal_in_both_frameworks_and_over_json(name: str):
    """Of the TensorDict, the ArrayDict and the text there is one layout, with one fingerprint."""
    layout = layout_of(zoo.KINDS[name]())
    with jax.enable_x64(True):
        there = layout_of(to_jax(zoo.KINDS[name]()))
    assert there == layout
    assert there.fingerprint == layout.fingerprint == layout_of(zoo.KINDS[name]()).fingerprint
    assert Layout.from_json(layout.to_json()) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_layouts_tell_the_kinds_apart():
    """A stack dimension, its name, a ragged dimension and a value per element count."""
    jagged = zoo.jagged()["j"]
    trees = [
        *(zoo.lazy(), zoo.lazy_named(), zoo.lazy().contiguous(), zoo.lazy_of_lazy()),
        LazyStackedTensorDict(zoo.nested(), zoo.nested(), stack_dim=1),
        *(TensorDict({"j": jagged}, [2]), TensorDict({"j": jagged.transpose(1, 2)}, [2])),
        *(TensorDict({"s": NonTensorStack(*values)}, [2]) for values in ("ab", "aa")),
        TensorDict({"s": "a"}, [2]),
        *(zoo.params(), zoo.params().to_tensordict()),
        TensorDict({"u": torch.ones(2, 3)}, [2]),
        TensorDict({"u": UnbatchedTensor(torch.ones(2, 3))}, [2]),
    ]
    layouts = [layout_of(tree) for tree in trees]
    assert len({layout.fingerprint for layout in layouts}) == len(set(layouts)) == len(trees)


def test_the_parts_of_a_jagged_tensor_are_leaves():
    """A layout has its values and offsets under the key of the tensor."""
    layout = layout_of(zoo.jagged())
    assert [(leaf.path, leaf.dtype, leaf.shape) for leaf in layout.leaves] == [
        (("j", "values"), "float32", (6, 3)),
        (("j", "offsets"), "int64", (3,)),
        (("x",), "int8", (2,)),
    ]


def test_a_stored_tensordict_has_the_layout_of_its_values():
    """What a PersistentTensorDict holds is laid out and packed as a TensorDict of it."""
    stored = PersistentTensorDict.from_dict(zoo.nested(), filename=BytesIO())
    assert layout_of(stored) == layout_of(zoo.nested())
    assert zoo.described(consolidate(stored)) == zoo.described(zoo.nested())


@pytest.mark.parametrize(
    "keys",
    [["n"], ["y"], ["u", "u"], ["x", "u"], [], ["u", "x", "z"], [["u"]], "u", None, [1], {}],
    ids=str,
)
def test_unbatched_keys_are_leaves_of_the_node_sorted(keys: Any):
    """Keys of no leaf, doubled, out of order or missing ones make no layout."""
    text = layout_of(zoo.unbatched()).to_json()
    data = json.loads(text)
    assert data["nodes"][0][5] == ["u"]
    assert Layout.from_json(text)
    data["nodes"][0][5] = keys
    with pytest.raises(LayoutError, match="no layout"):
        Layout.from_json(json.dumps(data))


# --- buffers


@pytest.mark.parametrize("name", PACKED)
def test_a_kind_lies_in_one_buffer(name: str):
    """The same tree over one buffer: itself when consolidated again, the same when unpickled."""
    tree = consolidate(zoo.KINDS[name]())
    assert_packed(tree, name)
    assert tree.is_consolidated()
    assert consolidate(tree) is tree
    assert_packed(pickle.loads(pickle.dumps(tree)), name)
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    assert_packed(torch.load(file, weights_only=False), name)


@pytest.mark.parametrize("name", IN_FILES)
def test_a_file_holds_a_kind(name: str, tmp_path: Path):
    """What is returned maps the file, and stock reads the same tree from it."""
    assert_packed(consolidate(zoo.KINDS[name](), filename=tmp_path / "file"), name)
    assert_packed(TensorDict.from_consolidated(tmp_path / "file"), name)


@pytest.mark.parametrize("name", PACKED)
def test_a_buffer_of_a_kind_is_filled_again(name: str):
    """`out` gets the new values in the memory that it has."""
    out = consolidate(zoo.KINDS[name]())
    places = [leaf.data_ptr() for leaf in tensors(out)]
    for leaf in tensors(out):
        leaf.zero_()
    assert consolidate(zoo.KINDS[name](), out=out) is out
    assert [leaf.data_ptr() for leaf in tensors(out)] == places
    assert_packed(out, name)


@pytest.mark.parametrize("name", PACKED)
def test_jax_shares_the_buffer(name: str):
    """Every leaf is aligned and row-major, so that nothing is copied either way."""
    with jax.enable_x64(True):
        back = to_torch(to_jax(consolidate(zoo.KINDS[name]()), copy=False), copy=False)
    assert zoo.described(back) == zoo.described(packed(name))


STOCK = """
import pathlib, pickle, sys
from tensordict import TensorDict
from tests import zoo
folder = pathlib.Path(sys.argv[1])
found = {file.name: TensorDict.from_consolidated(file) for file in folder.glob("*.file")}
found |= {file.name: pickle.loads(file.read_bytes()) for file in folder.glob("*.pickle")}
found = {name: zoo.described(tree) for name, tree in found.items()}
assert "tdbridge" not in sys.modules
(folder / "found").write_bytes(pickle.dumps(found))
"""


def test_stock_alone_reads_every_kind(tmp_path: Path):
    """A process that never imports tdbridge reads the same trees from files and from pickles."""
    for name in PACKED:
        tree = consolidate(zoo.KINDS[name]())
        (tmp_path / f"{name}.pickle").write_bytes(pickle.dumps(tree))
    for name in IN_FILES:
        consolidate(zoo.KINDS[name](), filename=tmp_path / f"{name}.file")
    subprocess.run([sys.executable, "-c", STOCK, str(tmp_path)], cwd=ROOT, check=True)
    found = pickle.loads((tmp_path / "found").read_bytes())
    expected = {name: zoo.described(packed(name)) for name in PACKED}
    assert found == {
        **{f"{name}.pickle": expected[name] for name in PACKED},
        **{f"{name}.file": expected[name] for name in IN_FILES},
    }


def reserved(value: Any) -> TensorDict:
    """Under the names that stock has for itself, beside a plain value of such a name."""
    td = TensorDict(dict.fromkeys(("size", "cls", "leaves", "<NJT_VALUES>a", "=x"), value), [2])
    return td.set_non_tensor("non_tensors", "text")


RESERVED = {
    "stacks of values": lambda: reserved(NonTensorStack("a", "b")),
    "lazy stacks": lambda: reserved(LazyStackedTensorDict(zoo.flat(), zoo.flat())),
    "jagged": lambda: reserved(zoo.jagged()["j"]),
    "members": lambda: LazyStackedTensorDict(zoo.reserved_keys(), zoo.reserved_keys()),
}


@pytest.mark.parametrize("kind", RESERVED)
def test_names_that_stock_uses_are_kept(kind: str, tmp_path: Path):
    """They come back from a pickle; a file cannot have them, and is refused."""
    make = RESERVED[kind]
    found = pickle.loads(pickle.dumps(consolidate(make())))
    assert zoo.described(found) == zoo.described(make())
    with pytest.raises(LayoutError, match=r"is named .* which a file for from_consolidated cannot"):
        consolidate(make(), filename=tmp_path / "file")


def test_a_jagged_tensor_may_be_named_size_in_a_file(tmp_path: Path):
    """Its parts are leaves, which share no name with stock's own."""
    td = TensorDict({"size": zoo.jagged()["j"]}, [2])
    consolidate(td, filename=tmp_path / "file")
    found = TensorDict.from_consolidated(tmp_path / "file")
    assert zoo.described(found) == zoo.described(td)


def test_a_value_in_a_stack_that_json_has_not_is_named(tmp_path: Path):
    """The values per element of a file are JSON too."""
    with pytest.raises(
        LayoutError, match=r"^\['n', 'v'\]: got a NonTensorStack that JSON would not"
    ):
        consolidate(zoo.values_per_element(), filename=tmp_path / "file")


def test_what_a_buffer_cannot_hold_is_named():
    """An unbatched leaf and a lazy stack of tensorclasses are refused by their paths."""
    with pytest.raises(LeafTypeError, match=r"^\['u'\]: got an UnbatchedTensor, .* expand it over"):
        consolidate(zoo.unbatched())
    tree = TensorDict({"n": {"rows": zoo.lazy_of_tensorclasses()}})
    with pytest.raises(LeafTypeError, match=r"^\['n', 'rows'\]: got a lazy stack of a tensorclass"):
        consolidate(tree)
    assert consolidate(tree.contiguous()).is_consolidated()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda td: td.set("v", NonTensorStack("a", "c")), "at []: got NodeSpec"),
        (lambda td: td.set("l", zoo.lazy_named()), "at ['l']: got NodeSpec"),
        (lambda td: td.set("l", LazyStackedTensorDict(*[zoo.nested()] * 3)), "at ['l', '2']: got"),
    ],
)
def test_a_buffer_is_filled_by_its_like_alone(change: Any, message: str):
    """Other values per element and other stacks are named, and `out` stays what it was."""
    td = TensorDict({"l": zoo.lazy()}, []).set("v", NonTensorStack("a", "b"))
    out = consolidate(td)
    before = zoo.described(out)
    with pytest.raises(LayoutError) as error:
        consolidate(change(td.copy()), out=out)
    assert message in str(error.value)
    assert zoo.described(out) == before
