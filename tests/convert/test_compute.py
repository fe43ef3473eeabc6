"""What JAX computes from a converted leaf is right, whatever the strides it had in torch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tdbridge import to_jax, to_torch
from tests import zoo
from tests.convert.trees import x64_for


@pytest.mark.parametrize("name", zoo.TREES)
def test_jit_reads_every_leaf_right(name: str):
    """A jitted program sees the elements of each leaf in their order, bit by bit."""

    @jax.jit
    def twice(ad):
        return ad.map(lambda leaf: jnp.concatenate([leaf.reshape(-1), leaf.reshape(-1)]))

    with x64_for(name):
        got = twice(to_jax(zoo.TREES[name]()))
    for path, values in zoo.expected(name).items():
        assert zoo.same_bits(np.asarray(got[path]), np.tile(values.reshape(-1), 2))


MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS = jax.NamedSharding(MESH, jax.P("x"))


def compiled_for(shape: tuple[int, ...]) -> Callable[[Any], Any]:
    spec = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.jit(lambda x: x + 1.0).lower(spec).compile()


ADD_ONE: dict[str, Callable[[jax.Array], Any]] = {
    "eager": lambda x: x + 1.0,
    "jit": jax.jit(lambda x: x + 1.0),
    "ahead_of_time": lambda x: compiled_for(x.shape)(x),
    "constant_of_jit": lambda x: jax.jit(lambda: x + 1.0)(),
    "vmap": jax.vmap(lambda row: row + 1.0),
    "scan": lambda x: jax.lax.scan(lambda carry, row: (carry, row + 1.0), 0, x)[1],
    "grad": jax.grad(lambda y: (y * y / 2 + y).sum()),
    "other_device": lambda x: jax.device_put(x, jax.devices("cpu")[3]) + 1.0,
    "sharded": lambda x: jax.device_put(x, ROWS) + 1.0,
    "with_a_sharded_array": lambda x: x + jax.device_put(np.ones(x.shape, np.float32), ROWS),
    "shard_map": jax.shard_map(
        lambda rows: rows + 1.0, mesh=MESH, in_specs=jax.P("x"), out_specs=jax.P("x")
    ),
    "copied_by_jax": lambda x: x.copy() + 1.0,
}

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row_major": lambda x: x,
    "transposed": lambda x: x.clone().transpose(0, 1),
    "permuted": lambda x: x.permute(2, 0, 1),
    "channels_last": lambda x: x[..., None].to(memory_format=torch.channels_last)[..., 0],
    "columns": lambda x: x[:, 1:5],
    "expanded": lambda x: x[:, :1].expand(8, 8, 8),
    "unaligned": lambda x: x.reshape(-1)[8:-56].reshape(8, 7, 8),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("program", ADD_ONE)
def test_every_program_reads_every_view_right(program: str, view: str):
    """jit, vmap, scan, grad, sharding and moves between devices read any view as torch reads it."""
    tensor = VIEWS[view](torch.arange(512.0).reshape(8, 8, 8))
    expected = (tensor + 1).numpy()
    got = ADD_ONE[program](to_jax(tensor))
    assert np.array_equal(np.asarray(got), expected)
    assert np.array_equal(to_torch(got).numpy(), expected)


@pytest.mark.parametrize("view", VIEWS)
def test_device_and_sharding_place_every_view_right(view: str):
    """`device=` and `sharding=` put the elements of any view where they belong."""
    tensor = VIEWS[view](torch.arange(512.0).reshape(8, 8, 8))
    moved = to_jax(tensor, device=jax.devices("cpu")[3])
    split = to_jax(tensor, sharding=ROWS)
    assert np.array_equal(np.asarray(moved + 1.0), (tensor + 1).numpy())
    for shard in split.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), tensor[shard.index[0]].numpy())
    assert np.array_equal(np.asarray(split + 1.0), (tensor + 1).numpy())


def test_a_program_compiled_for_another_leaf_reads_the_next_one_right():
    """A jitted program that is called again, with a leaf of other strides, is right each time."""
    program = jax.jit(lambda x: x * 2.0)
    base = torch.arange(64.0).reshape(8, 8)
    for tensor in (base, base.t(), base, base.t().clone(), base.t()):
        assert np.array_equal(np.asarray(program(to_jax(tensor))), (tensor * 2).numpy())
