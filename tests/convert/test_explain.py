"""explain says what the conversions then do."""

import jax.numpy as jnp
import pytest
import torch
from tensordict import TensorDict

import tdbridge
from tests import zoo
from tests.convert.trees import x64_for


@pytest.mark.parametrize("name", zoo.TREES)
def test_what_it_calls_shared_is_shared(name: str):
    """A leaf is shared exactly when its array starts at the tensor's own address."""
    tree = zoo.TREES[name]()
    with x64_for(name):
        report = tdbridge.explain(tree, to="jax")
        arrays = tdbridge.to_jax(tree)
    tensors = zoo.leaves(tree)
    assert {row.path for row in report.rows} == set(tensors)
    for row in report.rows:
        tensor = tensors[row.path]
        assert (row.dtype, row.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        assert row.nbytes == tensor.numel() * tensor.element_size()
        if tensor.numel():
            same = arrays[row.path].unsafe_buffer_pointer() == tensor.data_ptr()
            assert (row.fate == "shared") == same, row
        assert (row.fate == "shared") == (row.reason == "")


def test_it_reads_no_value_and_changes_nothing():
    """A tree that to_jax refuses is explained; its storage can still be resized afterwards."""
    tensor = torch.tensor([2**40])
    (row,) = tdbridge.explain({"id": tensor}, to="jax").rows
    assert (row.fate, row.reason) == ("copied", "int64 becomes int32 while x64 is off")
    tensor.untyped_storage().resize_(0)


def test_refused_leaves_are_rows_among_the_others():
    """What cannot be carried is listed with the reason that the error would give."""
    quarter = jnp.ones(2, jnp.int4)
    report = tdbridge.explain({"k": quarter, "x": jnp.ones(2), "n": 3}, to="torch")
    assert [(row.path, row.fate) for row in report.rows] == [
        (("k",), "refused"),
        (("x",), "shared"),
    ]
    assert report.rows[0].reason.startswith("dtype int4, which torch does not have")


def test_it_prints_a_table_with_totals():
    """A line per leaf, brackets unharmed, and the bytes of each fate."""
    td = TensorDict({"x": torch.ones(4, 3), "t": torch.ones(3, 4).t()}, [4])
    text = str(tdbridge.explain(td, to="jax"))
    assert "['x'] │ float32 │ [4,3] │    48 │ shared" in text
    assert "['t'] │ float32 │ [4,3] │    48 │ copied │ its strides (1, 4) are not row-major" in text
    assert text.splitlines()[-1] == "48 bytes shared, 48 bytes copied, 0 bytes refused"


def test_numpy_leaves_are_explained_too():
    """A numpy array that torch cannot take is copied, and says why."""
    aligned = torch.zeros(4).numpy()
    rows = tdbridge.explain({"ok": aligned, "back": aligned[::-1]}, to="jax").rows
    assert {row.path[0]: row.fate for row in rows} == {"ok": "shared", "back": "copied"}


def test_another_direction_is_refused():
    """There are two directions."""
    with pytest.raises(ValueError, match='to is "jax" or "torch", got \'numpy\''):
        tdbridge.explain({}, to="numpy")  # pyright: ignore[reportArgumentType]
