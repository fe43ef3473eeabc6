"""jax.export writes functions of our trees, and reads them back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tdbridge import ArrayDict, LayoutError, to_jax
from tdbridge.pytrees.export import from_bytes, to_bytes
from tests import zoo
from tests.pytrees.trees import STRUCTURES


def test_an_exported_function_takes_and_gives_arraydicts():
    """Serialised and read again, the function computes the same, names and constants included."""
    ad = ArrayDict({"x": jnp.arange(6.0).reshape(2, 3), "s": "text"}, [2], names=["time"])

    def double(tree):
        return tree.replace(y=tree["x"].sum(1) * 2.0)

    blob = export.export(jax.jit(double))(ad).serialize()
    got: Any = export.deserialize(blob).call(ad)
    assert np.asarray(got["y"]).tolist() == [6.0, 24.0]
    assert (got["s"], got.names, got.batch_size) == ("text", ["time"], (2,))


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_definition_comes_back_equal(name: str):
    """What is written as bytes is read as an equal definition."""
    definition = to_jax(zoo.TREES[name]())._definition
    assert from_bytes(to_bytes(definition)) == definition


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"keys": 1}', b"\xff"])
def test_other_bytes_are_refused(data: bytes):
    """Bytes that are no definition are an error of ours."""
    with pytest.raises(LayoutError, match="no definition of a tree"):
        from_bytes(data)
