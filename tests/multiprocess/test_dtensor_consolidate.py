"""consolidate of trees with DTensors: the shards in one buffer, and DTensors over them."""

import io
import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict, lazy_stack
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import tdbridge
from tdbridge import Layout, consolidate, layout_of
from tests import zoo
from tests.multiprocess.jobs import box_of, distributed, mesh_of, raised
from tests.multiprocess.pool import Pool

pytestmark = pytest.mark.xdist_group("multiprocess")

# (placements, shape, dtype)
ONE_AXIS = [
    ([Shard(0)], (8, 3), "float32"),
    ([Shard(0)], (7, 3), "bfloat16"),  # uneven
    ([Shard(1)], (3, 1), "int64"),  # nothing on the last rank
    ([Shard(0)], (0, 3), "float32"),
    ([Replicate()], (5,), "int64"),
    ([Replicate()], (), "float32"),
    ([Shard(-1)], (2, 6), "float8_e4m3fn"),
]
TWO_AXES = [
    ([Replicate(), Shard(0)], (7, 3), "bfloat16"),  # HSDP, uneven
    ([Replicate(), Shard(1)], (2, 5), "int64"),
    ([Shard(0), Shard(0)], (5, 2), "float32"),  # nothing on the last rank
    ([Shard(1), Shard(0)], (3, 6), "float32"),
    ([_StridedShard(0, split_factor=2), Shard(0)], (8, 3), "float32"),
    ([Replicate(), Replicate()], (3,), "bool"),
]


def tree(mesh_shape: Any, cases: Any) -> TensorDict:
    """The cases as leaves, every other one in a nested tree, beside a leaf that is no DTensor."""
    leaves = [distributed(mesh_shape, *case) for case in cases]
    nested = {str(i): leaf for i, leaf in enumerate(leaves) if i % 2}
    own = {str(i): leaf for i, leaf in enumerate(leaves) if not i % 2}
    plain = torch.full((3,), float(dist.get_rank()))
    return TensorDict({**own, "n": TensorDict(nested), "plain": plain, "text": "a"})


def leaf_of(td: Any, i: int) -> Any:
    return td["n", str(i)] if i % 2 else td[str(i)]


def shard_of(leaf: Any) -> torch.Tensor:
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def consolidated(mesh_shape: Any, cases: Any) -> Any:
    td = tree(mesh_shape, cases)
    new = consolidate(td)
    old_leaves, leaves = list(zoo.leaves(td).values()), list(zoo.leaves(new).values())
    shards = list(map(shard_of, leaves))
    dtensors = [(leaf_of(td, i), leaf_of(new, i)) for i in range(len(cases))]
    layout = layout_of(td)
    places = {leaf.path: leaf.offset for leaf in layout.leaves}
    base = shards[0].untyped_storage().data_ptr()
    return {
        "kept": [
            (type(x), x.device_mesh is d.device_mesh, x.placements == d.placements)
            for d, x in dtensors
        ],
        "shapes": [(tuple(x.shape), x.stride() == d.stride()) for d, x in dtensors],
        "boxes": [box_of(x) for _, x in dtensors],
        "bits": [zoo.as_numpy(x.to_local()) for _, x in dtensors],
        "wholes": [zoo.as_numpy(x.full_tensor()) for _, x in dtensors if x.itemsize > 1],
        "storages": {shard.untyped_storage().data_ptr() for shard in shards if shard.numel()},
        "sizes": (shards[0].untyped_storage().nbytes(), layout.nbytes),
        "places": [
            shard_of(new.get(path)).data_ptr() - base == offset
            for path, offset in places.items()
            if shard_of(new.get(path)).numel()
        ],
        "contiguous": all(shard.is_contiguous() for shard in shards),
        "apart": {shard_of(x).data_ptr() for x in old_leaves}
        & {shard.data_ptr() for shard in shards if shard.numel()},
        "locked": (td.is_locked, new.is_locked, new.is_consolidated()),
        "others": (new["plain"].tolist(), new["text"], list(new.keys()) == list(td.keys())),
        "again": consolidate(new) is new,
        "read": Layout.from_json(layout.to_json()) == layout == layout_of(new),
    }


def check(pool: Pool, mesh_shape: Any, cases: Any) -> None:
    wholes = [zoo.as_numpy(zoo.pattern(name, *shape)) for _, shape, name in cases]
    for rank, found in enumerate(pool.run(consolidated, mesh_shape, cases)):
        assert found["kept"] == [(DTensor, True, True)] * len(cases)
        assert found["shapes"] == [(shape, True) for _, shape, _ in cases]
        for bits, box, whole in zip(found["bits"], found["boxes"], wholes, strict=True):
            assert zoo.same_bits(bits, whole[box])
        gathered = [whole for whole in wholes if whole.itemsize > 1]
        for got, whole in zip(found["wholes"], gathered, strict=True):
            assert zoo.same_bits(got, whole)
        assert len(found["storages"]) == 1
        assert len({*found["sizes"]}) == 1
        assert all(found["places"])
        assert found["contiguous"]
        assert not found["apart"]
        assert found["locked"] == (False, True, False)
        assert found["others"] == ([rank] * 3, "a", True)
        assert found["again"]
        assert found["read"]


def test_shards_over_two_ranks_lie_in_one_buffer(two: Pool):
    """Even, uneven and empty shards lie where the layout says; the rest of a DTensor is kept."""
    check(two, (2,), ONE_AXIS)


def test_shards_over_two_axes_lie_in_one_buffer(four: Pool):
    """The same on a mesh of two by two ranks, for HSDP and for FSDP over tensor parallelism."""
    check(four, (2, 2), TWO_AXES)


def batch() -> Any:
    leaf = distributed((2,), [Shard(0)], (8, 3), "float32")
    inner = TensorDict({"y": distributed((2,), [Replicate()], (8, 2), "bfloat16")}, [8, 2])
    stack = lazy_stack([TensorDict(z=distributed((2,), [Shard(0)], (4,), "int64"))] * 2)
    td = TensorDict({"x": leaf, "inner": inner}, [8], names=["time"])
    new, lazy = consolidate(td), consolidate(stack)
    return (
        (new.batch_size, new.names, new["inner"].batch_size),
        (type(lazy), lazy.batch_size, [m["z"].full_tensor().tolist() for m in lazy.tensordicts]),
        [(node.path, node.batch_size) for node in layout_of(td).nodes],
        [(leaf.path, leaf.shape) for leaf in layout_of(td).leaves],
    )


def test_batch_sizes_are_global_and_the_layout_is_local(two: Pool):
    """Batch sizes and names are those of the whole; the layout has the shapes of the shards."""
    values = zoo.pattern("int64", 4).tolist()
    for sizes, lazy, nodes, leaves in two.run(batch):
        assert sizes == ((8,), ["time"], (8, 2))
        assert lazy[0].__name__ == "LazyStackedTensorDict"
        assert lazy[1:] == ((2,), [values, values])
        assert nodes == [((), ()), (("inner",), ())]
        assert leaves == [(("inner", "y"), (8, 2)), (("x",), (4, 3))]


def odd_shards() -> Any:
    mesh, rank = mesh_of(2), dist.get_rank()
    transposed = DTensor.from_local(torch.arange(6.0).reshape(2, 3).t(), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.full((3,), rank + 1.0), mesh, [Partial()])
    grad = torch.nn.Parameter(distributed((2,), [Shard(0)], (4,), "float32"))
    new = consolidate(TensorDict(t=transposed, p=partial, g=grad))
    return (
        (new["t"].stride(), new["t"].full_tensor().tolist()),
        (new["p"].placements, new["p"].to_local().tolist(), new["p"].full_tensor().tolist()),
        (new["g"].requires_grad, grad.requires_grad),
    )


def test_transposed_and_partial_shards_and_parameters(two: Pool):
    """Shards are made contiguous, a pending sum stays one, and the leaves are detached."""
    column = [[0, 3], [1, 4], [2, 5]]
    for rank, (transposed, partial, grad) in enumerate(two.run(odd_shards)):
        assert transposed == ((2, 1), column + column)
        assert partial == ((Partial(),), [rank + 1] * 3, [3, 3, 3])
        assert grad == (False, True)


def off_mesh() -> Any:
    mesh = mesh_of(2, 2)["a"]  # ranks 0 and 2 of one, 1 and 3 of another
    local = torch.full((2,), float(dist.get_rank()))
    new = consolidate(TensorDict(x=DTensor.from_local(local, mesh, [Shard(0)])))
    return new["x"].device_mesh is mesh, new["x"].full_tensor().tolist()


def test_a_slice_of_a_mesh_is_kept(four: Pool):
    """Each column of the ranks has a tree of its own."""
    expected = [(True, [0, 0, 2, 2]), (True, [1, 1, 3, 3])]
    assert four.run(off_mesh) == expected * 2


# --- filled again


def refilled() -> Any:
    out = consolidate(tree((2, 2), TWO_AXES))
    pointers = [shard_of(leaf).data_ptr() for leaf in zoo.leaves(out).values()]
    for leaf in zoo.leaves(out).values():
        shard_of(leaf).zero_()
    same = consolidate(tree((2, 2), TWO_AXES), out=out) is out
    # From itself, where each leaf lies in the buffer that is written to.
    same = same and consolidate(out.clone(False), out=out) is out
    after = [shard_of(leaf).data_ptr() for leaf in zoo.leaves(out).values()]
    wholes = [leaf_of(out, i).full_tensor() for i in range(len(TWO_AXES))]
    return same and after == pointers, [zoo.as_numpy(whole) for whole in wholes]


def test_a_buffer_is_filled_again(four: Pool):
    """The same DTensors over the same memory, with the values of the new source."""
    for same, wholes in four.run(refilled):
        assert same
        for whole, (_, shape, name) in zip(wholes, TWO_AXES, strict=True):
            assert zoo.same_bits(whole, zoo.as_numpy(zoo.pattern(name, *shape)))


def swapped() -> Any:
    mesh = mesh_of(2)
    a, b = [DTensor.from_local(torch.full((2,), float(v)), mesh, [Shard(0)]) for v in (1, 2)]
    out = consolidate(TensorDict(a=a, b=b))
    consolidate(TensorDict(a=out["b"], b=out["a"]), out=out)
    return out["a"].full_tensor().tolist(), out["b"].full_tensor().tolist()


def test_leaves_of_the_buffer_itself_may_change_places(two: Pool):
    """Each is read before its place is written to."""
    assert two.run(swapped) == [([2] * 4, [1] * 4)] * 2


def refill_refusals() -> Any:
    def made(placement: Any, shape: Any = (4, 2), mesh: Any = (2, 2)) -> TensorDict:
        placements = [Replicate(), placement] if len(mesh) == 2 else [placement]
        return TensorDict({"n": {"w": distributed(mesh, placements, shape, "float32")}})

    out = consolidate(made(Shard(0)))
    before = out["n", "w"].to_local().clone()
    plain = TensorDict({"n": {"w": torch.zeros(4, 2)}})
    texts = [
        raised(consolidate, made(Shard(1)), out=out),
        raised(consolidate, made(Shard(0), mesh=(4,)), out=out),
        raised(consolidate, made(Shard(0), shape=(6, 2)), out=out),
        raised(consolidate, plain, out=out),
        raised(consolidate, made(Shard(0)), out=consolidate(plain)),
        raised(consolidate, made(Shard(0)), out=consolidate(made(Shard(0))).unlock_()),
    ]
    return texts, bool((out["n", "w"].to_local() == before).all())


def test_another_sharding_is_refused(four: Pool):
    """What the buffer of `out` could not hold raises, naming the leaf, and nothing is written."""
    sharding = "LayoutError: `out` has another sharding: at ['n', 'w']: got a DTensor of "
    nothing = "LayoutError: `out`, a TensorDict, is no result of tdbridge.consolidate of a tree"
    for texts, same in four.run(refill_refusals):
        assert texts[0].startswith(sharding + "[Replicate(), Shard(dim=0)] over DeviceMesh(")
        assert ", expected a DTensor of [Replicate(), Shard(dim=1)] over" in texts[0]
        assert ", expected a DTensor of [Shard(dim=0)] over DeviceMesh((a=4)" in texts[1]
        assert texts[2].startswith("LayoutError: `out` has another layout: at ['n', 'w']: got Leaf")
        assert "shape=(6, 2)" in texts[2]
        assert texts[3].startswith(sharding)
        assert texts[3].endswith(", expected a plain tensor.")
        assert texts[4].startswith(nothing)
        assert texts[5].startswith(nothing)
        assert same


# --- what others make of it


def sent() -> Any:
    new = consolidate(tree((2,), ONE_AXIS[:-1]))  # plain pickle of torch loads no float8
    saved = io.BytesIO()
    torch.save(new, saved)
    saved.seek(0)
    pickles = [pickle.loads(pickle.dumps(new, protocol)) for protocol in (2, 5)]
    pickles += [torch.load(saved, weights_only=False), pickle.loads(pickle.dumps(new["n"]))]
    back = pickles[:3]
    return (
        [
            [leaf_of(td, i).placements == leaf_of(new, i).placements for i in range(6)]
            for td in back
        ],
        [[zoo.as_numpy(leaf_of(td, i).to_local()) for i in range(6)] for td in back],
        [zoo.as_numpy(leaf_of(new, i).to_local()) for i in range(6)],
        list(pickles[3].keys()),
        len(pickle.dumps(consolidate(TensorDict({str(i): big() for i in range(20)})))),
    )


def big() -> DTensor:
    return distributed((2,), [Shard(0)], (2048,), "float32")


def test_a_pickle_keeps_the_dtensors(two: Pool):
    """Mesh, placements and values come back; the buffer is not sent once for each leaf."""
    for placements, bits, expected, keys, size in two.run(sent):
        assert placements == [[True] * 6] * 3
        for tree in bits:
            assert all(map(zoo.same_bits, tree, expected))
        assert keys == ["1", "3", "5"]
        assert 20 * 4096 < size < 30 * 4096


def to_jax_and_cast() -> Any:
    td = TensorDict({"w": distributed((2,), [Shard(0)], (8, 3), "float32"), "p": torch.ones(3)})
    new = consolidate(td)
    array: Any = tdbridge.to_jax(new, copy=False)["w"]
    (shard,) = array.addressable_shards
    half: Any = tdbridge.cast(new, torch.bfloat16)
    return (
        (array.shape, shard.data.unsafe_buffer_pointer() == new["w"].to_local().data_ptr()),
        float(jnp.sum(array)),
        (half["w"].dtype, half["w"].placements, half.is_locked, half["p"].dtype),
        half["w"].full_tensor().float().numpy(),
    )


def test_to_jax_shares_and_cast_keeps_dtensors(two: Pool):
    """The aligned shards are shared; a cast tree has DTensors, each in memory of its own."""
    whole = zoo.pattern("float32", 8, 3)
    for shared, total, kept, half in two.run(to_jax_and_cast):
        assert shared == ((8, 3), True)
        assert total == float(whole.sum())
        assert kept == (torch.bfloat16, (Shard(0),), True, torch.bfloat16)
        np.testing.assert_array_equal(half, whole.to(torch.bfloat16).float().numpy())


def refusals() -> list[str]:
    td = TensorDict({"n": {"w": distributed((2,), [Shard(0)], (4,), "float32")}})
    meta = DTensor.from_local(torch.empty(2, device="meta"), mesh_of(2), [Shard(0)])
    return [
        raised(consolidate, td, filename="/nowhere/file"),
        raised(consolidate, td, device="meta"),
        raised(consolidate, TensorDict({"n": {"w": meta}})),
        raised(tdbridge.to_jax, consolidate(td), packed=True),
        raised(tdbridge.to_jax, td, packed=True),
    ]


def test_what_cannot_be_done_raises(two: Pool):
    """A file, another device, shards without values, a packed tree."""
    packed = (
        "LeafTypeError: ['n', 'w']: got a DTensor, and a packed tree has arrays of one device: use "
        "packed=False, or pack the local shards."
    )
    expected = [
        (
            "LayoutError: got DTensors with filename: a file has the shards of one rank and no "
            "words for the others. Use tdbridge.checkpoint.save."
        ),
        (
            "LayoutError: got device='meta' and DTensors whose shards are on 'cpu': a DTensor "
            "stays where its mesh is. Move the shards, `to_local()`, instead."
        ),
        (
            "LeafTypeError: ['n', 'w']: got a tensor on the meta device, which holds no values: "
            "materialise it first."
        ),
        packed,
        packed,
    ]
    assert two.run(refusals) == [expected] * 2
