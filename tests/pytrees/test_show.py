"""How an ArrayDict is printed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tdbridge
from tdbridge import ArrayDict
from tests import zoo
from tests.pytrees.trees import STRUCTURES, arrays

MESH = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("data", "model"))
AD = ArrayDict(
    {"obs": jnp.zeros((4, 2)), "next": {"reward": np.zeros(4, np.int8), "e": {}}, "label": "text"},
    [4],
    names=["time"],
)


def test_a_tree_shows_keys_dtypes_and_shapes():
    """One line per entry, nested trees indented, batch size and names in front."""
    assert repr(AD).splitlines() == [
        "ArrayDict(batch_size=[4], names=['time'],",
        "    label: 'text'",
        "    next: batch_size=[4]",
        "        e: batch_size=[4]",
        "        reward: int8[4]",
        "    obs: float32[4,2])",
    ]


def test_the_class_is_shown_where_it_is_not_tensordict():
    """A tensorclass is named, at the root and inside."""
    assert repr(tdbridge.to_jax(zoo.tensorclass())).startswith(
        "ArrayDict(batch_size=[2], tensorclass=Step,\n"
    )


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_tree_has_a_repr_with_all_of_its_keys(name):
    """Nothing is left out, however the keys look."""
    ad = arrays(name)
    text = repr(ad)
    assert text.startswith(f"ArrayDict(batch_size={list(ad.batch_size)}")
    assert text.endswith(")")
    keys = [key if isinstance(key, str) else key[-1] for key in ad.keys(include_nested=True)]
    assert all(re.search(rf"^ +{re.escape(key)}: ", text, re.MULTILINE) for key in keys)


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        (PartitionSpec("data"), "P('data',)"),
        (PartitionSpec(None, "model"), "P(None, 'model')"),
        (PartitionSpec(("data", "model")), "P(('data', 'model'),)"),
        (PartitionSpec(), "P()"),
    ],
)
def test_a_leaf_on_several_devices_shows_its_spec(spec, shown):
    """The PartitionSpec stands behind the shape, also that of a replicated leaf."""
    leaf = jax.device_put(jnp.zeros((8, 2)), NamedSharding(MESH, spec))
    ad = ArrayDict({"n": {"x": leaf}, "y": jnp.zeros(8)}, [8])
    assert repr(ad).splitlines()[2:] == [f"        x: float32[8,2] {shown}", "    y: float32[8])"]


def test_a_tree_is_shown_inside_transformations_and_without_values():
    """Tracers, ShapeDtypeStructs, masks and None print too."""
    texts = []
    jax.jit(lambda ad: texts.append(repr(ad)))(AD)
    assert texts == [repr(AD)]
    jax.vmap(lambda ad: texts.append(repr(ad)))(AD)
    assert "reward: int8[]" in texts[1]
    assert repr(jax.eval_shape(lambda ad: ad, AD)) == repr(AD)
    assert "obs: True" in repr(AD.map(lambda _: True))
    assert "obs: None" in repr(AD.map(lambda _: None))


def test_a_deleted_array_is_shown():
    """A donated tree still tells what it held."""
    ad = AD.map(jnp.array)
    jax.jit(lambda ad: ad, donate_argnums=0)(ad)
    assert "obs: float32[4,2]" in repr(ad)
