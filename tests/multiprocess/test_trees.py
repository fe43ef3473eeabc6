"""Trees with DTensors in them, through to_jax and to_torch on every rank."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tensordict import TensorDict
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import tdbridge
from tests import zoo
from tests.multiprocess.jobs import distributed, mesh_of, only_shard, raised
from tests.multiprocess.pool import Pool

pytestmark = pytest.mark.xdist_group("multiprocess")

P = PartitionSpec


def tree() -> TensorDict:
    """A batch, half of it distributed, half of it this rank's own."""
    return TensorDict(
        {
            "obs": distributed((2,), [Shard(0)], (8, 3), "float32"),
            "next": {"obs": distributed((2,), [Replicate()], (8, 2), "bfloat16")},
            "own": torch.arange(8, dtype=torch.int32),
        },
        [8],
        names=["time"],
    )


def pointer(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return (leaf.to_local() if isinstance(leaf, DTensor) else leaf).data_ptr()
    return only_shard(leaf).data.unsafe_buffer_pointer()


LEAVES = ["obs", ("next", "obs"), "own"]


def there_and_back(copy: bool | None) -> Any:
    td = tree()
    ad: Any = tdbridge.to_jax(td, copy=copy)
    back = tdbridge.to_torch(ad, copy=copy)
    total = float(jax.jit(lambda ad: jnp.sum(ad["obs"] * 2))(ad))
    return {
        "specs": [ad[key].sharding.spec for key in LEAVES[:2]],
        "batch": (ad.batch_size, ad.names, back.batch_size, back.names),
        "shared": [len({pointer(t[key]) for t in (td, ad, back)}) == 1 for key in LEAVES],
        "classes": [type(back[key]) for key in LEAVES],
        "placements": [back[key].placements for key in LEAVES[:2]],
        "bits": [zoo.as_numpy(back[key].full_tensor()) for key in LEAVES[:2]],
        "total": total,
    }


@pytest.mark.parametrize("copy", [None, False, True])
def test_a_tensordict_with_dtensors_goes_there_and_back(two: Pool, copy: bool | None):
    """Distributed leaves are global arrays, others stay local; batch size and names are kept."""
    whole = [zoo.pattern("float32", 8, 3), zoo.pattern("bfloat16", 8, 2)]
    for found in two.run(there_and_back, copy):
        assert found["specs"] == [P("a"), P()]
        assert found["batch"] == ((8,), ["time"], (8,), ["time"])
        assert found["shared"] == [not copy] * 3
        assert found["classes"] == [DTensor, DTensor, torch.Tensor]
        assert found["placements"] == [(Shard(0),), (Replicate(),)]
        assert found["total"] == 2 * float(whole[0].sum())
        for bits, expected in zip(found["bits"], whole, strict=True):
            assert zoo.same_bits(bits, zoo.as_numpy(expected))


def refused() -> list[str]:
    partial = DTensor.from_local(torch.ones(3), mesh_of(2), [Partial()])
    uneven = distributed((2,), [Shard(0)], (3,), "float32")
    good = distributed((2,), [Shard(0)], (4,), "float32")
    errors = raised(tdbridge.to_jax, {"p": partial, "n": [uneven], "g": good})
    return errors.splitlines()


def test_one_error_lists_all_leaves_on_every_rank(two: Pool):
    """What cannot cross is listed by its path, with the advice, before anything is converted."""
    for first, *lines in two.run(refused):
        assert first == "LeafTypeError: to_jax cannot carry:"
        assert len(lines) == 2
        assert lines[0].startswith(
            "  ['n', '0']: got shape (3,), whose dimension 0 the mesh axes a"
        )
        assert lines[0].endswith("or use a mesh whose size divides 3.")
        assert lines[1].startswith("  ['p']: got Partial(sum) on mesh axis 'a', which JAX cannot")
        assert lines[1].endswith("with Replicate() or Shard(dim) there first.")


def unaligned() -> str:
    dtensor = DTensor.from_local(torch.arange(9.0)[1:], mesh_of(2), [Shard(0)])
    return raised(tdbridge.to_jax, {"x": dtensor}, copy=False)


def test_copy_false_names_a_shard_that_would_be_copied(two: Pool):
    """The rule for sharing is that of plain tensors."""
    for error in two.run(unaligned):
        assert error.startswith("CopyError: copy=False, but these leaves cannot share memory:")
        assert "['x']: it starts 4 bytes past a multiple of 64." in error


def on_own_devices() -> Any:
    sharding = NamedSharding(Mesh(np.array(jax.local_devices()), ("d",)), P("d"))
    return jax.device_put(jnp.arange(4.0), sharding)


def whole_in_each_process() -> Any:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P())
    return jax.device_put(np.arange(4.0, dtype=np.float32), sharding)


def converted(make: Any) -> Any:
    tensor = tdbridge.to_torch(make())
    return type(tensor), tensor.tolist()


@pytest.mark.parametrize("make", [on_own_devices, whole_in_each_process])
def test_arrays_that_this_process_has_whole_are_plain_tensors(two: Pool, make: Any):
    """What `to_torch` assembles in a job of one process it assembles here."""
    assert two.run(converted, make) == [(torch.Tensor, [0, 1, 2, 3])] * 2


def split_by_jax() -> str:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
    array = jax.device_put(np.arange(4.0, dtype=np.float32), sharding)
    return raised(tdbridge.to_torch, {"x": array})


def test_an_array_over_more_devices_than_ranks_is_refused(two: Pool):
    """torch has one shard per rank: the error has the path and says to reshard."""
    for error in two.run(split_by_jax):
        assert error.startswith("LeafTypeError: to_torch cannot carry:\n  ['x']: got Mesh(")
        assert "with several devices of one process" in error


def narrowed_floats() -> Any:
    dtensor = distributed((2,), [Shard(0)], (4,), "float64")
    array: Any = tdbridge.to_jax({"x": dtensor}, narrow="allow")["x"]
    return array.dtype, np.asarray(only_shard(array).data).tolist()


def test_floats_are_narrowed_when_allowed(two: Pool):
    """narrow="allow" rounds a DTensor's shards too."""
    values = zoo.as_numpy(zoo.pattern("float64", 4)).tolist()
    expected = [(np.dtype("float32"), values[:2]), (np.dtype("float32"), values[2:])]
    assert two.run(narrowed_floats) == expected


def explained() -> Any:
    unaligned = DTensor.from_local(torch.arange(9.0)[1:], mesh_of(2), [Shard(0)])
    tensors = {"a": distributed((2,), [Shard(0)], (8,), "float32"), "b": unaligned}
    arrays = {"c": tdbridge.to_jax(tensors)["a"]}
    reports = tdbridge.explain(tensors, to="jax"), tdbridge.explain(arrays, to="torch")
    return [(row.path[0], row.shape, row.fate) for report in reports for row in report.rows]


def test_explain_says_what_becomes_of_the_shards(two: Pool):
    """The report has the global shapes, and whether this rank's shard is shared."""
    expected = [("a", (8,), "shared"), ("b", (16,), "copied"), ("c", (8,), "shared")]
    assert two.run(explained) == [expected] * 2
