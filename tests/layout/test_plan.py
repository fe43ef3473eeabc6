"""layout_of: what a layout depends on, what it does not, and that it is computed once."""

import copy
import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tensordict import TensorDict

import tdbridge
from tdbridge import layout_of
from tdbridge._compat.tensordict import new_tensordict
from tdbridge.errors import LeafTypeError
from tdbridge.layout import plan
from tests import zoo


def reversed_tree(tree: Any) -> Any:
    """The same tree, built in the opposite order."""
    if isinstance(tree, torch.Tensor) or not hasattr(tree, "batch_size"):
        return tree
    entries = {key: reversed_tree(value) for key, value in reversed(list(tree.items()))}
    if type(tree) in (TensorDict, zoo.Batch):
        return type(tree)(entries, tree.batch_size, names=tree.names, device=tree.device)
    return tree


@pytest.mark.parametrize("name", zoo.TREES)
def test_the_order_of_insertion_does_not_count(name):
    """A tree built backwards has an equal layout and an equal fingerprint."""
    source, other = zoo.TREES[name](), reversed_tree(zoo.TREES[name]())
    assert layout_of(other) == layout_of(source)
    assert layout_of(other).fingerprint == layout_of(source).fingerprint
    assert hash(layout_of(other)) == hash(layout_of(source))


@pytest.mark.parametrize("name", zoo.TREES)
def test_the_framework_does_not_count(name):
    """The ArrayDict of a tree has the layout and the fingerprint of the TensorDict."""
    source = zoo.TREES[name]()
    with jax.enable_x64(True):
        found = layout_of(tdbridge.to_jax(source))
    assert found == layout_of(source)
    assert found.fingerprint == layout_of(source).fingerprint


@pytest.mark.parametrize("name", zoo.TREES)
def test_memory_does_not_count(name):
    """Device, strides, locking and consolidation are no part of the layout; values are not read."""
    source = zoo.TREES[name]()
    layout = layout_of(source)
    assert layout_of(source.to("meta")) == layout
    assert layout_of(tdbridge.consolidate(source)) == layout
    assert layout_of(zoo.TREES[name]().lock_()) == layout


def test_the_process_does_not_count(elsewhere):
    """Fingerprints are equal in a process with another hash seed."""
    here = {name: layout_of(build()).fingerprint for name, build in zoo.TREES.items()}
    assert elsewhere["fingerprints"] == here


def test_different_trees_have_different_fingerprints():
    """No two trees of the zoo share a layout or a fingerprint, of 64 hexadecimal digits."""
    layouts = {name: layout_of(build()) for name, build in zoo.TREES.items()}
    for (_, left), (_, right) in itertools.combinations(layouts.items(), 2):
        assert left != right
        assert left.fingerprint != right.fingerprint
    assert all(len(bytes.fromhex(layout.fingerprint)) == 32 for layout in layouts.values())


# A tree as plain data, so that two of them can be compared without the code under test.
Recipe = dict[str, Any]
keys = st.sampled_from(["a", "b", "ab", "a.b", ""])
values = st.sampled_from([0, 0.0, -0.0, False, "0", (0,), [0], None, float("nan"), {"k": 0}, b"0"])


def recipes(depth: int = 1) -> st.SearchStrategy[Recipe]:
    return st.fixed_dictionaries(
        {
            "class": st.sampled_from([TensorDict, zoo.Batch]),
            "batch": st.sampled_from([(), (1,), (2,), (2, 1), (0,)]),
            "names": st.sampled_from([None, "t", "u"]),
            "leaves": st.dictionaries(
                keys,
                st.tuples(st.sampled_from(["int8", "float32"]), st.sampled_from([(), (1,), (3,)])),
            ),
            "constants": st.dictionaries(keys, values, max_size=2),
            "nested": st.dictionaries(keys, recipes(depth - 1), max_size=2)
            if depth
            else st.just({}),
        }
    )


def build(recipe: Recipe, batch: tuple[int, ...] = (), *, backwards: bool = False) -> Any:
    batch = (*batch, *recipe["batch"])
    items: list[tuple[str, Any]] = [
        (key, torch.zeros((*batch, *event), dtype=getattr(torch, dtype)))
        for key, (dtype, event) in recipe["leaves"].items()
    ]
    items += [
        (k, build(inner, batch, backwards=backwards)) for k, inner in recipe["nested"].items()
    ]
    items += list(recipe["constants"].items())
    td = recipe["class"]({}, batch)
    for key, value in reversed(items) if backwards else items:
        if key in recipe["constants"]:
            td.set_non_tensor(key, value)
        else:
            td[key] = value
    if batch and recipe["names"]:
        td.names = [*[None] * (len(batch) - 1), recipe["names"]]
    return td


def described(recipe: Recipe) -> Any:
    """What the layout must tell apart: values by type, dicts without their order."""
    return {
        **recipe,
        "names": recipe["names"] if recipe["batch"] else None,
        "constants": {key: repr(value) for key, value in recipe["constants"].items()},
        "nested": {key: described(inner) for key, inner in recipe["nested"].items()},
    }


def sound(recipe: Recipe) -> bool:
    """One entry per key, and names of nested trees that do not depend on those around them."""
    used = [*recipe["leaves"], *recipe["constants"], *recipe["nested"]]
    unique = len(used) == len(set(used))
    plain = all(not inner["names"] for inner in recipe["nested"].values())
    return unique and plain and all(sound(inner) for inner in recipe["nested"].values())


mutations = st.sampled_from(["class", "batch", "names", "leaves", "constants", "nested"])


@given(recipes(), recipes(), mutations, st.booleans())
def test_every_part_of_a_tree_counts(recipe, other, part, inside):
    """Changing one thing changes layout, fingerprint and JSON; changing nothing changes none."""
    changed = copy.deepcopy(recipe)
    target = next(iter(changed["nested"].values())) if inside and changed["nested"] else changed
    target[part] = other[part]
    assume(sound(recipe) and sound(changed))
    left, right = layout_of(build(recipe)), layout_of(build(changed, backwards=True))
    same = described(recipe) == described(changed)
    assert (left == right) == same
    assert (left.fingerprint == right.fingerprint) == same
    assert (left.to_json() == right.to_json()) == same
    assert tdbridge.Layout.from_json(left.to_json()) == left


def test_a_layout_is_computed_once_per_structure(monkeypatch):
    """The second batch of the same structure costs no planning, whatever its values."""
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return make_layout(*args)

    make_layout = plan.make_layout
    monkeypatch.setattr(plan, "make_layout", counted)

    def batch(value: float, rows: int = 11) -> TensorDict:
        td = TensorDict(
            {"once": torch.full((rows, 2), value), "n": {"y": torch.ones(rows)}}, [rows]
        )
        td.set_non_tensor("config", {"lr": [0.1]})
        return td

    first = layout_of(batch(1.0))
    assert len(calls) == 1
    assert layout_of(batch(2.0)) is first
    consolidated = tdbridge.consolidate(batch(3.0))
    tdbridge.consolidate(batch(4.0), out=consolidated)
    layout_of(tdbridge.consolidate(consolidated))
    assert len(calls) == 1
    assert layout_of(batch(1.0, rows=12)) != first
    assert len(calls) == 2


def test_a_cached_layout_does_not_follow_a_value_changed_in_place():
    """A list changed after one tree was laid out is not in the layout of the next tree."""
    first, second = TensorDict({"x": torch.ones(5)}), TensorDict({"x": torch.ones(5)})
    value = ["kept"]
    first.set_non_tensor("d", value)
    layout_of(first)
    value.append("later")
    second.set_non_tensor("d", ["kept"])
    (key, constant), *_ = tdbridge.Layout.from_json(layout_of(second).to_json()).nodes[0].constants
    assert (key, constant.value) == ("d", ["kept"])
    assert layout_of(first) != layout_of(second)


def test_threads_agree_on_one_layout():
    """Threads that lay out and consolidate one structure in all orders get the same bytes."""
    rows = {f"k{i}": zoo.pattern("float32" if i % 2 else "int8", 3, i) for i in range(6)}
    orders = list(itertools.islice(itertools.permutations(rows), 0, 720, 9))
    barrier = threading.Barrier(8)

    def work(worker: int) -> set[tuple[str, bytes]]:
        barrier.wait()
        found = set()
        for order in orders[worker % 4 :]:
            td = TensorDict({key: rows[key] for key in order}, [3])
            c = tdbridge.consolidate(td)
            assert list(c.keys()) == list(order)
            whole = torch.empty(0, dtype=torch.uint8).set_(c["k1"].untyped_storage())
            found.add((layout_of(td).fingerprint, whole.numpy().tobytes()))
        return found

    with ThreadPoolExecutor(8) as pool:
        results = set().union(*pool.map(work, range(8)))
    assert len(results) == 1


def test_names_that_are_all_none_are_no_names():
    """A tree whose batch dimensions have no names is the tree that never had any."""
    named = TensorDict({"x": torch.zeros(2)}, [2], names=[None])  # type: ignore[reportArgumentType]
    assert layout_of(named) == layout_of(TensorDict({"x": torch.zeros(2)}, [2]))


@pytest.mark.parametrize(
    "leaf", [True, None, (1, 2), object()], ids=lambda leaf: type(leaf).__name__
)
def test_a_leaf_without_dtype_is_named_by_its_whole_path(leaf):
    """A tree of masks or shapes has no layout; the error says where."""
    inner = new_tensordict(TensorDict, {"x": leaf}, batch_size=[])
    tree = new_tensordict(TensorDict, {"n": inner}, batch_size=[])
    with pytest.raises(LeafTypeError, match=r"^\['n', 'x'\]: got a \w+ without a dtype or a shape"):
        layout_of(tree)


def test_a_dtype_outside_the_table_is_named_by_its_whole_path():
    """A dtype that has no row in the table cannot be laid out; the error says where."""
    dtype = torch.uint4  # type: ignore[reportAttributeAccessIssue]
    td = TensorDict({"n": {"x": torch.empty(3, dtype=dtype)}})
    with pytest.raises(LeafTypeError, match=r"^\['n', 'x'\]: got dtype torch\.uint4"):
        layout_of(td)


@pytest.mark.parametrize("tree", [{"a": torch.zeros(2)}, torch.zeros(2), None, [1], np.zeros(2)])
def test_what_is_no_tree_is_refused(tree):
    """Dicts, tensors and arrays are no trees; the error says what is."""
    with pytest.raises(LeafTypeError, match="expected a TensorDict, a tensorclass or an ArrayDict"):
        layout_of(tree)


def test_a_strided_nested_tensor_is_named_by_its_whole_path():
    """A leaf whose shape is not a tuple of numbers has no place; the error says where."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that they are a prototype
        leaf = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    message = r"^\['n', 'x'\]: got a Tensor without a dtype or a shape"
    with pytest.raises(LeafTypeError, match=message):
        layout_of(TensorDict({"n": {"x": leaf}}))


def test_a_value_that_changes_with_each_batch_costs_no_new_plan():
    """A counter beside the tensors moves no byte: the plan is made once, the layouts differ."""

    def batch(step: int) -> TensorDict:
        td = TensorDict({"counted": torch.zeros(4, 3)}, [4])
        return td.set_non_tensor("step", step)

    first = layout_of(batch(0))
    planned = plan._plan.cache_info().misses
    layouts = [layout_of(batch(step)) for step in range(1, 5)]
    assert plan._plan.cache_info().misses == planned
    assert len({first, *layouts}) == 5
    assert [layout.nodes[0].constants[0][1].value for layout in layouts] == [1, 2, 3, 4]
