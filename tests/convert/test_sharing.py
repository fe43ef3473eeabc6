"""What is shared and what is copied: proven by pointers, both ways, and told by `why_copied`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.layout import Format, Layout
from tensordict import TensorDict

import tdbridge
from tdbridge import to_jax, to_torch
from tdbridge.convert.sharing import why_copied
from tests import zoo
from tests.convert.trees import address, aligned, extremes, pairs, tensor_of, x64_for

STRIDED = {
    "transposed": "its strides (1, 4) ",
    "channels_last": "its strides (12, 1, 6, 3) ",
    "columns": "its strides (6, 1) ",
    "step": "its strides (6, 2) ",
    "expanded": "its strides (1, 0) ",
    "unaligned": "it starts 20 bytes past a multiple of 64",
    "scalar": None,
    "conj": "its conjugate bit has to be resolved",
    "neg": "its negative bit has to be resolved",
}
SIXTY_FOUR = {
    "int64": "int64 becomes int32 while x64 is off",
    "uint64": "uint64 becomes uint32 while x64 is off",
    "float64": "float64 becomes float32 while x64 is off",
    "complex128": "complex128 becomes complex64 while x64 is off",
}


def assert_shared(tensor: torch.Tensor, array: jax.Array, shared: bool) -> None:
    if tensor.numel():
        assert (address(array) == address(tensor)) == shared


@pytest.mark.parametrize("name", zoo.TREES)
def test_torch_to_jax_shares_exactly_what_it_says(name: str):
    """A leaf has the address of its tensor if, and only if, `why_copied` gives no reason."""
    td = zoo.TREES[name]()
    with x64_for(name):
        ad = to_jax(td)
        for _, tensor, array in pairs(td, ad):
            assert_shared(tensor, array, why_copied(tensor) is None)


@pytest.mark.parametrize("name", zoo.TREES)
def test_jax_to_torch_shares_every_leaf_on_one_device(name: str):
    """A tensor has the address of its array, whatever its dtype, shape and layout."""
    with x64_for(name):
        ad = to_jax(zoo.TREES[name]())
        td = to_torch(ad, copy=False)
    for _, tensor, array in pairs(td, ad):
        assert_shared(tensor, array, True)


@pytest.mark.parametrize(("leaf", "reason"), STRIDED.items())
def test_why_a_strided_leaf_is_copied(leaf: str, reason: str | None):
    """Row-major leaves alone are shared; the reason names what is in the way.

    A permuted leaf is copied although JAX could hold its layout: jit takes an uncommitted array
    for row-major, and `device_put` between CPU devices any array (seen on jax 0.10.2), so that
    what they compute from it is wrong.
    """
    tensor = zoo.strided()[leaf]
    why = why_copied(tensor)
    assert why == reason if reason is None else str(why).startswith(reason)
    assert_shared(tensor, to_jax(tensor), reason is None)


@pytest.mark.parametrize("name", zoo.BOTH)
def test_every_common_dtype_is_shared_both_ways_with_x64(name: str):
    """With x64 on each dtype of both frameworks crosses, and comes back, at the same address."""
    tensor = tensor_of(np.resize(extremes(name), (4, 6)))
    with jax.enable_x64(True):
        assert why_copied(tensor) is None
        array = to_jax(tensor, copy=False)
    assert array.dtype == zoo.numpy_dtype(name)
    assert address(array) == address(tensor)
    back = to_torch(array, copy=False)
    assert back.dtype == tensor.dtype
    assert address(back) == address(tensor)


@pytest.mark.parametrize("name", zoo.BOTH)
def test_an_array_of_another_layout_is_shared_with_torch(name: str):
    """An array that JAX holds column by column becomes a transposed tensor over the same memory."""
    values = np.resize(extremes(name), (4, 6))
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    with jax.enable_x64(True):
        array = jax.device_put(values, Format(Layout((1, 0)), device))
    tensor = to_torch(array, copy=False)
    assert tensor.stride() == (1, 4)
    assert address(tensor) == address(array)
    assert zoo.same_bits(zoo.as_numpy(tensor), values)


@pytest.mark.parametrize(("name", "reason"), SIXTY_FOUR.items())
def test_64_bit_leaves_are_copied_without_x64(name: str, reason: str):
    """While x64 is off a 64-bit leaf gets 32 bits, and so memory of its own."""
    tensor = zoo.pattern(name, 4, 4)
    assert why_copied(tensor) == reason
    assert_shared(tensor, to_jax(tensor, narrow="allow"), False)


@pytest.mark.parametrize("offset", range(0, 132, 4))
def test_alignment_decides(offset: int):
    """A tensor is shared if it starts on a multiple of 64 bytes, and copied anywhere else."""
    raw = torch.zeros(256, dtype=torch.uint8)
    assert raw.data_ptr() % 64 == 0
    tensor = raw[offset : offset + 64].view(torch.float32)
    tensor.copy_(torch.arange(16.0))
    array = to_jax(tensor)
    assert (why_copied(tensor) is None) == (offset % 64 == 0)
    assert_shared(tensor, array, offset % 64 == 0)
    assert array.tolist() == list(range(16))


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (0,), (2, 0), (1, 1, 1), (3, 1, 5), (1, 4)],
)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "float8_e5m2", "complex64"])
def test_small_shapes_are_shared(name: str, shape: tuple[int, ...]):
    """Tensors of no dimensions, of one element and of none are shared and keep their shape."""
    tensor = zoo.pattern(name, *shape)
    array = to_jax(tensor, copy=False)
    back = to_torch(array, copy=False)
    assert array.shape == tuple(back.shape) == shape
    assert_shared(tensor, array, True)
    assert zoo.same_bits(zoo.as_numpy(back), zoo.as_numpy(tensor))


STRIDES = {
    "gap_in_a_dimension_of_one": ((1, 16), (99, 1), True),
    "stride_of_any_size_in_a_dimension_of_one": ((4, 1, 4), (4, 77, 1), True),
    "stride_zero_in_a_dimension_of_one": ((4, 4, 1), (4, 1, 0), True),
    "permuted": ((2, 4, 2), (2, 4, 1), False),
    "permuted_around_a_dimension_of_one": ((4, 1, 4), (1, 77, 4), False),
    "overlapping": ((4, 4), (1, 1), False),
    "overlapping_rows": ((3, 4), (2, 1), False),
    "repeated": ((4, 4), (0, 1), False),
    "every_other": ((8,), (2,), False),
    "gap_between_rows": ((2, 4), (8, 1), False),
}


@pytest.mark.parametrize("case", STRIDES)
def test_any_strides_give_the_right_values(case: str):
    """A leaf is shared when it is row-major, however its strides spell it."""
    shape, stride, row_major = STRIDES[case]
    tensor = torch.arange(100.0).as_strided(shape, stride)
    array = to_jax(tensor)
    assert np.array_equal(np.asarray(array), tensor.numpy())
    assert (why_copied(tensor) is None) == row_major
    assert_shared(tensor, array, row_major)


def test_a_consolidated_tree_is_shared_whole():
    """`tdbridge.consolidate` aligns every leaf, so that copy=False is never refused."""
    for name in zoo.TREES:
        td = tdbridge.consolidate(zoo.TREES[name]())
        with x64_for(name):
            for _, tensor, array in pairs(td, to_jax(td, copy=False)):
                assert_shared(tensor, array, True)


def test_a_memory_mapped_tree_is_shared_where_aligned(tmp_path):
    """The files of TensorDict.memmap and load_memmap are read by JAX in place."""
    source = TensorDict(
        {"x": torch.arange(64.0).reshape(4, 16), "n": {"y": torch.arange(4, dtype=torch.int32)}},
        [4],
        names=["time"],
    )
    source["s"] = "text"
    written = source.memmap(tmp_path)
    for td in (written, TensorDict.load_memmap(tmp_path)):
        ad = to_jax(td, copy=False)
        for _, tensor, array in pairs(td, ad):
            assert_shared(tensor, array, True)
        assert np.array_equal(np.asarray(ad["x"]), source["x"].numpy())
        assert np.array_equal(np.asarray(ad["n", "y"]), source["n", "y"].numpy())
        assert ad["s"] == "text"
        back = to_torch(ad)
        assert type(back["x"]) is torch.Tensor
        assert not back.is_memmap()
    loaded = TensorDict.load_memmap(tmp_path)[1:]
    assert why_copied(loaded["x"]) is None
    assert why_copied(loaded["n", "y"]) == "it starts 4 bytes past a multiple of 64"
    assert_shared(loaded["n", "y"], to_jax(loaded)["n", "y"], False)


def test_shared_torch_memory_is_shared_with_jax_too():
    """A tensor that `share_memory_` moved before the conversion is shared where it lies."""
    tensor = torch.arange(16.0).share_memory_()
    array = to_jax(tensor, copy=False)
    assert address(array) == address(tensor)
    assert array.tolist() == list(range(16))


def test_numpy_leaves_are_shared_where_aligned():
    """A numpy array in a pytree is read in place when it starts on a multiple of 64 bytes."""
    array = aligned(np.arange(16, dtype=np.float32))
    assert address(to_jax({"x": array}, copy=False)["x"]) == array.ctypes.data
    assert address(to_jax({"x": array[1:]})["x"]) != array[1:].ctypes.data


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


SPECS: dict[str, tuple[Any, bool]] = {
    "replicated": (jax.P(), True),
    "rows": (jax.P("x"), False),
    "columns": (jax.P(None, "y"), False),
    "both": (jax.P("x", "y"), False),
    "both_on_one": (jax.P(("x", "y")), False),
}


@pytest.mark.parametrize("spec", SPECS)
def test_an_array_over_several_devices(spec: str):
    """A split array is put together in a copy; a replicated one is shared with its first device."""
    partition, shared = SPECS[spec]
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(values, jax.NamedSharding(mesh(), partition))
    tensor = to_torch(array)
    assert np.array_equal(tensor.numpy(), values)
    shards = [shard.data for shard in array.addressable_shards]
    assert (address(tensor) in map(address, shards)) == shared
    assert to_torch(array, copy=True).data_ptr() not in map(address, shards)


@pytest.mark.parametrize("spec", SPECS)
def test_each_shard_is_shared(spec: str):
    """The local shards of a split array cross without a copy."""
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(values, jax.NamedSharding(mesh(), SPECS[spec][0]))
    shards = [shard.data for shard in array.addressable_shards]
    for shard, tensor in zip(array.addressable_shards, to_torch(shards, copy=False), strict=True):
        assert address(tensor) == address(shard.data)
        assert np.array_equal(tensor.numpy(), values[shard.index])


@pytest.mark.parametrize("index", range(8))
def test_an_array_on_any_cpu_device_is_shared(index: int):
    """Every virtual CPU device is torch's one CPU."""
    array = jax.device_put(jnp.arange(16.0), jax.devices("cpu")[index])
    tensor = to_torch(array, copy=False)
    assert tensor.device == torch.device("cpu")
    assert address(tensor) == address(array)
