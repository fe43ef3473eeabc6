"""The same tree with other entries; and that no tree is ever changed in place."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec
from tensordict import NonTensorData, TensorDict

import tdbridge
from tdbridge import ArrayDict
from tests import zoo
from tests.pytrees.trees import STRUCTURES, arrays, nodes, values


def small() -> TensorDict:
    return TensorDict(
        {
            "obs": zoo.pattern("float32", 4, 3),
            "next": {"reward": zoo.pattern("float32", 4), "done": zoo.pattern("bool", 4, 1)},
            "label": "text",
        },
        [4],
        names=["time"],
    )


TD = small()
AD = tdbridge.to_jax(small())


def entries(tree) -> dict:
    """Every entry by path: the values of leaves, nested trees by their batch size and names."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, (ArrayDict, TensorDict)):
            found[(key,)] = (tuple(value.batch_size), value.names)
            found.update({(key, *path): inner for path, inner in entries(value).items()})
        else:
            data = value.data if isinstance(value, NonTensorData) else value
            found[(key,)] = data if isinstance(data, str) else np.asarray(data).tolist()
    return found


CHANGES = {
    "select one": lambda t: t.select("obs"),
    "select nested": lambda t: t.select(("next", "reward"), "label"),
    "select none": lambda t: t.select(),
    "select what is not there": lambda t: t.select("zz", ("next", "zz"), "obs", strict=False),
    "select below a leaf": lambda t: t.select(("obs", "zz"), strict=False),
    "exclude one": lambda t: t.exclude("obs"),
    "exclude nested": lambda t: t.exclude(("next", "reward")),
    "exclude all of a tree": lambda t: t.exclude(("next", "reward"), ("next", "done")),
    "exclude what is not there": lambda t: t.exclude("zz", ("next", "zz"), ("obs", "zz")),
    "flatten": lambda t: t.flatten_keys(),
    "flatten with a separator": lambda t: t.flatten_keys("/"),
    "flatten and back": lambda t: t.flatten_keys(",").unflatten_keys(","),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_select_exclude_and_flatten_give_what_stock_gives(change):
    """The same entries, batch sizes and names as from stock TensorDict."""
    ours, stock = change(AD), change(TD)
    assert entries(ours) == entries(stock)
    assert ours.batch_size == tuple(stock.batch_size)
    assert ours.names == stock.names


@pytest.mark.parametrize("key", ["obs", "new", ("next", "reward"), ("next", "new"), ("a", "b")])
def test_replace_sets_one_entry(key):
    """The entry at a key is replaced where it exists and added where not; the others stay."""
    ours = AD.replace({key: jnp.ones((4, 2))})
    stock = TD.clone().set(key, torch.ones(4, 2))
    assert entries(ours) == entries(stock)


def test_replace_takes_keywords_and_merges_mappings():
    """Keywords are keys; a mapping, or an ArrayDict, is merged into the nested tree there."""
    new = jnp.ones(4)
    ours = AD.replace({"next": {"reward": new}}, obs=new)
    assert ours["next", "reward"] is new
    assert ours["obs"] is new
    assert ours["next", "done"] is AD["next", "done"]
    merged = AD.replace(next=ArrayDict({"z": new}, [4]))
    assert list(merged["next"].keys()) == ["done", "reward", "z"]
    assert list(AD.replace(source=new).keys()) == ["label", "next", "obs", "source"]


def test_or_takes_the_entries_of_the_right():
    """`a | b` has the entries of both; those of b win, and nested trees are not merged."""
    new = jnp.ones(4)
    joined = AD | {"obs": new, "next": {"z": new}}
    assert list(joined.keys(True)) == ["label", "next", ("next", "z"), "obs"]
    assert joined["obs"] is new
    assert list((AD | ArrayDict({"z": new}, [4])).keys()) == ["label", "next", "obs", "z"]
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = AD | [1]


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_change_copies_no_leaf(name):
    """Leaves that are not named are the same objects afterwards, at every depth."""
    ad = arrays(name)
    extra = np.zeros((*ad.batch_size, 2), np.float32)
    for changed in (
        ad.replace(extra=extra),
        ad | {"extra": extra},
        ad.replace({("q", "r"): extra}),
    ):
        assert all(changed[key] is ad[key] for key in ad.keys(True, True))
        assert list(changed.exclude("extra", "q").keys(True)) == list(ad.keys(True))


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_change_keeps_what_it_does_not_name(name):
    """Batch size, names, class and non-tensor values stay: the definition is the same."""
    ad = arrays(name)
    definition = jax.tree.structure(ad)
    extra = np.zeros((*ad.batch_size, 2), np.float32)
    assert jax.tree.structure(ad.replace()) == definition
    assert jax.tree.structure(ad.select(*ad.keys())) == definition
    assert jax.tree.structure(ad.exclude()) == definition
    assert jax.tree.structure(ad | {}) == definition
    if len(ad):
        assert jax.tree.structure(ad.replace(zz=extra).exclude("zz")) == definition


@pytest.mark.parametrize(
    "value", [{"k": [1, 2.5], "t": 1}, 3, 0.5, True, np.arange(2), np.arange(3), "text", None]
)
def test_a_non_tensor_entry_stays_one(value):
    """A dict, a number or an array that is no tensor on the torch side never becomes a leaf."""
    td = TensorDict({"x": torch.zeros(2)}, [2])
    td["value"] = NonTensorData(value, batch_size=[2])
    ad = tdbridge.to_jax(td)
    changed = {
        "replace": ad.replace(y=jnp.ones(2)),
        "select": ad.select("x", "value"),
        "exclude": ad.exclude("x"),
        "or": ad | {"y": jnp.ones(2)},
        "flatten": ad.flatten_keys(),
        "unflatten": ad.unflatten_keys(),
    }
    for how, new in changed.items():
        np.testing.assert_equal(new["value"], value, err_msg=how)
        assert "value" not in new.keys(leaves_only=True), how
        np.testing.assert_equal(tdbridge.to_torch(new)["value"], value, err_msg=how)


LEAVES = {
    "none": lambda _: None,
    "true": lambda _: True,
    "spec": lambda _: PartitionSpec("data"),
    "object": lambda _: object(),
    "scalar": lambda _: jnp.zeros(()),
    "state": lambda leaf: {"m": leaf, "v": leaf},
}


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.select("obs", ("next", "done")),
        lambda t: t.exclude(("next", "done")),
        lambda t: t.flatten_keys(),
        lambda t: t.flatten_keys().unflatten_keys(),
        lambda t: t.replace({("next", "reward"): jnp.ones(4)}).exclude("next"),
    ],
)
def test_a_tree_of_other_leaves_changes_as_the_tree_of_arrays_does(change):
    """Masks, None, PartitionSpecs and optimizer states stay leaves of the same definition."""
    is_leaf = lambda x: not isinstance(x, ArrayDict)  # noqa: E731
    for kind, leaf in LEAVES.items():
        mapped = jax.tree.map(leaf, AD)
        expected = jax.tree.map(leaf, change(AD))
        found = jax.tree.structure(change(mapped), is_leaf=is_leaf)
        assert found == jax.tree.structure(expected, is_leaf=is_leaf), kind


def test_what_takes_the_place_of_a_leaf_that_is_no_array_is_a_leaf():
    """One PartitionSpec of a tree of them can be replaced: it still is a tree of specs."""
    specs = AD.map(lambda _: PartitionSpec("data"))
    other = PartitionSpec("model")
    for changed in (specs.replace(obs=other), specs | {"obs": other}):
        assert changed["obs"] is other
        assert jax.tree.structure(changed) == jax.tree.structure(specs)


@pytest.mark.parametrize("name", [n for n in STRUCTURES if n not in ("odd_keys", "deeper_batch")])
def test_unflatten_undoes_flatten(name):
    """With a separator that no key has, flattening keys and unflattening them changes nothing."""
    ad = arrays(name)
    if ad.tensorclass.__name__ == "Step":
        ad = ArrayDict(ad, ad.batch_size)
    flat = ad.flatten_keys("|")
    assert not any(isinstance(v, ArrayDict) and len(v) for v in flat.values())
    back = flat.unflatten_keys("|")
    assert list(back.keys(True)) == list(ad.keys(True))
    assert all(back[key] is ad[key] for key in ad.keys(True, True))
    sizes = {path: (node.batch_size, node.names) for path, node in nodes(ad).items()}
    assert {path: (node.batch_size, node.names) for path, node in nodes(back).items()} == sizes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda: AD.select("zz"), KeyError, "'zz' is not among the keys"),
        (lambda: AD.select(("next", "zz")), KeyError, "('next', 'zz') is not among the keys"),
        (lambda: AD.select(("obs", "zz")), KeyError, "('obs', 'zz') is not among the keys"),
        (lambda: AD.select(("label", "zz")), KeyError, "('label', 'zz') is not among the keys"),
        (lambda: AD.replace(obs=jnp.ones(3)), ValueError, "['obs']: got shape (3,)"),
        (lambda: AD.replace(n=ArrayDict({"z": np.ones(3)}, [3])), ValueError, "['n']: got shape"),
        (lambda: AD | ArrayDict({"z": np.ones(3)}, [3]), ValueError, "['z']: got shape (3,)"),
        (lambda: AD.replace(obs=torch.ones(4)), TypeError, "['obs']: got a torch.Tensor"),
        (lambda: AD.replace({3: jnp.ones(4)}), ValueError, "keys are strings or tuples of them"),
        (lambda: AD | {"z": torch.ones(4)}, TypeError, "['z']: got a torch.Tensor"),
        (lambda: AD.replace({"next.done": jnp.ones(4)}).flatten_keys(), KeyError, "'next.done'"),
        (lambda: ArrayDict({"a": 1, "a.b": 2}).unflatten_keys(), ValueError, "['a'] is a leaf"),
    ],
)
def test_a_change_that_cannot_be_is_refused(change, error, message):
    """The error names the key and what was got."""
    with pytest.raises(error, match=re.escape(message)):
        change()


def set_item(ad):
    ad["x"] = 1


def set_nested(ad):
    ad["x", "y"] = 1


def set_row(ad):
    ad[0] = 1


def delete_item(ad):
    del ad["x"]


def set_attribute(ad):
    ad.x = 1


def set_batch_size(ad):
    ad.batch_size = [2, 2]


def delete_attribute(ad):
    del ad.x


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (set_item, "replace"),
        (set_nested, "replace"),
        (set_row, "replace"),
        (delete_item, "exclude"),
        (set_attribute, "replace"),
        (set_batch_size, ""),
        (delete_attribute, "exclude"),
    ],
)
def test_nothing_can_be_set_or_deleted(change, name):
    """Assignment and deletion are TypeErrors that name the method to use instead."""
    before = values(AD)
    with pytest.raises(tdbridge.FrozenError, match=f"immutable: use ad.{name}") as caught:
        change(AD)
    assert isinstance(caught.value, TypeError)
    assert values(AD).keys() == before.keys()


@pytest.mark.parametrize("name", [*STRUCTURES, "all_dtypes"])
def test_pickle_and_deepcopy_give_the_same_tree_over_copies(name):
    """Both keep definition and bits, and share no leaf with the original."""
    ad = arrays(name)
    with jax.enable_x64(True):
        copies = pickle.loads(pickle.dumps(ad)), copy.deepcopy(ad)
    for again in copies:
        assert jax.tree.structure(again) == jax.tree.structure(ad)
        pairs = list(zip(jax.tree.leaves(again), jax.tree.leaves(ad), strict=True))
        assert all(zoo.same_bits(np.asarray(a), np.asarray(b)) for a, b in pairs)
        assert not any(a is b for a, b in pairs)
