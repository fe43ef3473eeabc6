"""A write to memory that JAX holds for constant is found while `debug_aliasing` is on."""

import gc
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tdbridge
from tdbridge import AliasingError, debug_aliasing, to_jax, to_torch, written_since
from tdbridge.convert import aliasing_record
from tests import zoo
from tests.convert.trees import extremes, listed, tensor_of

WRITTEN = "it was written in place."
OTHER = "its tensor lies in other memory now (set_, .data =)."
MOVED = "its storage was moved (share_memory_, a multiprocessing queue)."


@pytest.fixture
def switched_on() -> Iterator[None]:
    before = debug_aliasing()
    yield
    before.__exit__(ValueError, None, None)  # whatever was written is the test's own


def recorded(tree: Any) -> Any:
    """`tree` in JAX, recorded; the switch is off again."""
    with debug_aliasing():
        return to_jax(tree, copy=False)


def step(optimizer: Any, x: torch.Tensor) -> None:
    x.requires_grad_().grad = torch.ones_like(x)
    optimizer([x]).step()


COUNTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda x: x[1:].view(torch.int32).add_(1),
    "detach": lambda x: x.detach().mul_(2),
    "out": lambda x: torch.add(x, 1, out=x),
    "tensordict": lambda x: TensorDict({"x": x}, []).update_({"x": torch.zeros(64)}),
    "foreach": lambda x: step(lambda p: torch.optim.SGD(p, lr=0.5, foreach=True), x),
}
UNCOUNTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda x: x.numpy().fill(5),
    "data": lambda x: x.data.add_(1),
    "storage": lambda x: x.untyped_storage().copy_(torch.ones(64).untyped_storage()),
    "dlpack": lambda x: torch.from_dlpack(x).add_(1),
    "fused": lambda x: step(lambda p: torch.optim.SGD(p, lr=0.5, fused=True), x),
}


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("how", COUNTED)
def test_the_next_conversion_raises_for_a_write_that_torch_counts(how: str):
    """It lists the written leaves alone, by the paths of their own conversion."""
    tree = {"a": {"x": torch.arange(64.0)}, "b": torch.arange(64.0)}
    arrays = to_jax(tree)
    COUNTED[how](tree["a"]["x"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(AliasingError, match="copy=True") as caught:
        to_torch({"other": jnp.ones(3)})
    assert listed(caught.value) == {"['a', 'x']": WRITTEN}
    assert written_since(arrays).keys() == {("a", "x")}


@pytest.mark.parametrize("how", UNCOUNTED)
def test_the_end_of_a_block_raises_for_a_write_that_torch_does_not_count(how: str):
    """A conversion trusts torch's counter; the end of the block compares the bytes."""
    x, arrays = torch.arange(64.0), []
    with pytest.raises(AliasingError) as caught, debug_aliasing():  # noqa: PT012
        arrays.append(to_jax({"x": x}))
        UNCOUNTED[how](x)
        arrays.append(to_jax({"other": torch.ones(64)}))
    assert listed(caught.value) == {"['x']": WRITTEN}
    assert written_since(arrays).keys() == {("0", "x")}


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "bool", "complex64", "int8", "uint16"])
def test_a_write_is_found_in_every_dtype(name: str):
    """The bits are compared, whether numpy knows the dtype or not, and NaN equals itself."""
    x = tensor_of(extremes(name))
    arrays = recorded({"x": x, "scalar": x[0].clone()})
    x.copy_(x.clone())  # counted, and nothing changed
    assert written_since(arrays) == {}
    x[1] = x[0]
    assert written_since(arrays).keys() == {("x",)}


def test_leaves_of_one_buffer_are_told_apart():
    """They share torch's counter; only the leaf whose bytes changed is reported."""
    td = tdbridge.consolidate(TensorDict({"x": torch.ones(4), "n": {"y": torch.ones(4)}}, [4]))
    ad = recorded(td)
    td["n", "y"][2] = 7
    assert written_since(td) == written_since(ad) == {("n", "y"): WRITTEN.rstrip(".")}


def test_a_write_to_a_tensor_over_an_array_is_found():
    """The other direction, also by a tensor that nobody holds any more."""
    tree = {"x": jnp.arange(4.0), "y": jnp.arange(4.0)}
    with debug_aliasing():
        to_torch(tree)["x"].add_(1)
        with pytest.raises(AliasingError) as caught:
            to_torch({})
    assert listed(caught.value) == {"['x']": WRITTEN}
    assert written_since(tree).keys() == {("x",)}


@pytest.mark.parametrize("writer", [0, 1])
def test_a_round_trip_is_one_memory(writer: int):
    """Tensor, array, tensor: each tensor has its own counter, and each side sees every write."""
    first = {"x": torch.ones(4)}
    with debug_aliasing():
        array = to_jax(first)
        second = to_torch(array)
    (first, second)[writer]["x"].zero_()
    for tree in (first, array, second):
        assert written_since(tree).keys() == {("x",)}


def test_a_leaf_is_reported_by_one_error():
    """Conversions go on after it; written_since lists the leaf until it is converted again."""
    tree = {"x": torch.ones(4)}
    with debug_aliasing():
        arrays = to_jax(tree)
        tree["x"].zero_()
        with pytest.raises(AliasingError):
            to_jax(tree)
        assert written_since(tree) == written_since(arrays) == {("x",): WRITTEN.rstrip(".")}
        again = to_jax(tree)
        assert written_since(tree) == {}
        tree["x"].add_(1)
        with pytest.raises(AliasingError):
            to_jax({})
    assert written_since(again).keys() == {("x",)}


@pytest.mark.parametrize("end", ["drop", "cycle", "delete"])
def test_memory_that_jax_no_longer_reads_may_be_written(end: str):
    """No conversion raises when the array is gone; asked, written_since still answers."""
    x = torch.ones(4)
    with debug_aliasing():
        array = to_jax(x)
        if end == "delete":
            array.delete()
        elif end == "cycle":
            cycle = [array]
            cycle.append(cycle)
            del array, cycle
        else:
            del array
        x.zero_()
    assert written_since([x]).keys() == {("0",)}


def test_only_shared_leaves_are_recorded():
    """A copied leaf may be written; so may a leaf of the other framework that stayed."""
    tree = {"copied": torch.ones(5)[1:], "shared": torch.ones(4), "stayed": jnp.ones(4), "n": 3}
    with debug_aliasing():
        arrays = to_jax(tree)
        tree["copied"].zero_()
        with pytest.raises(AliasingError, match="no leaf of this tree was recorded"):
            written_since({"copied": arrays["copied"], "stayed": tree["stayed"], "n": 3})
    assert written_since(tree) == {}


@pytest.mark.parametrize("kind", ["inference", "no counter"])
def test_the_bytes_decide_where_there_is_no_counter(kind: str, monkeypatch: pytest.MonkeyPatch):
    """An inference tensor has none, and another version of torch may have none."""
    if kind == "no counter":
        monkeypatch.setattr(aliasing_record, "version_of", lambda _: None)
    with torch.inference_mode(kind == "inference"):
        x = torch.ones(4)
    with debug_aliasing():
        array = to_jax(x)
        to_jax(x)
        with torch.inference_mode():
            x.zero_()
        with pytest.raises(AliasingError):
            to_jax({})
    assert array.shape == (4,)


def test_the_counter_decides_off_the_cpu(monkeypatch: pytest.MonkeyPatch):
    """There no byte is read: a write counts even if it changed nothing."""
    monkeypatch.setattr(aliasing_record, "_crc", lambda _: None)
    x, y = torch.ones(4), torch.ones(4)
    arrays = recorded([x, y])
    x.add_(0)
    y.numpy().fill(5)
    assert written_since(arrays) == {("0",): WRITTEN.rstrip(".")}


def test_a_replicated_array_shares_its_first_shard():
    """`sharding=` copies for other devices; the shard on the tensor's own device is shared."""
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), "d"), PartitionSpec())
    x = torch.ones(16)
    with debug_aliasing():
        array = to_jax(x, sharding=everywhere)
    x.zero_()
    assert written_since([array]).keys() == {("0",)}


def test_a_dtensor_is_followed():
    """Its own counter and the bytes of its local shard."""
    store = dist.HashStore()  # type: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
        tree = {"x": distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])}
        with debug_aliasing():
            arrays = to_jax(tree)
            tree["x"].add_(1)
            with pytest.raises(AliasingError):
                to_jax({})
        assert written_since(arrays).keys() == written_since(tree).keys() == {("x",)}
    finally:
        dist.destroy_process_group()


def share(x: torch.Tensor, strategy: str, call: Callable[[torch.Tensor], Any]) -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        call(x)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.parametrize("strategy", sorted(torch.multiprocessing.get_all_sharing_strategies()))
@pytest.mark.parametrize("call", [torch.Tensor.share_memory_, ForkingPickler.dumps])
def test_memory_moved_by_torch_is_reported_and_not_read(strategy: str, call: Any):
    """`share_memory_` and a queue free the memory under the array: the error says so."""
    x = torch.arange(2.0**20)  # large enough that reading the freed memory ends the process
    with debug_aliasing():
        array = to_jax({"x": x})["x"]
        share(x, strategy, call)
        with pytest.raises(AliasingError, match="do not read it") as caught:
            to_jax({})
    assert listed(caught.value) == {"['x']": MOVED}
    assert written_since([array]) == written_since([x]) == {("0",): MOVED.rstrip(".")}


def test_memory_shared_before_the_conversion_stays():
    """`share_memory_()` first: a second call, and a queue, then move nothing."""
    x = torch.ones(64).share_memory_()
    array = recorded(x)
    x.share_memory_()
    ForkingPickler.dumps(x)
    assert written_since([x]) == {}
    assert array.tolist() == [1.0] * 64


def test_a_tensor_over_an_array_may_be_moved():
    """The array keeps memory of its own; the tensor goes, and that is reported."""
    array = jnp.arange(2.0**20)
    with debug_aliasing():
        tensor = to_torch({"x": array})["x"]
    tensor.share_memory_()
    tensor.zero_()
    assert written_since([array]) == {("0",): MOVED.rstrip(".")}
    assert np.array_equal(np.asarray(array), np.arange(2.0**20, dtype=np.float32))


@pytest.mark.parametrize(
    "replace",
    [
        lambda x: x.set_(torch.zeros(3)),
        lambda x: setattr(x, "data", torch.zeros(3)),
    ],
)
def test_a_tensor_that_lies_elsewhere_now_is_reported(replace: Callable[[torch.Tensor], Any]):
    """`set_` and `.data =`: the array keeps the old memory and sees no new value."""
    x = torch.ones(64)
    array = recorded(x)
    replace(x)
    assert written_since([array]) == {("0",): OTHER.rstrip(".")}
    assert array.tolist() == [1.0] * 64


def test_memmap_gives_the_tensordict_other_leaves(tmp_path: Any):
    """The old leaves keep their memory, so the array does; the new ones were never converted."""
    td = TensorDict({"x": torch.ones(64)}, [64])
    ad = recorded(td)
    td.memmap_(str(tmp_path))
    td["x"].zero_()
    assert written_since(ad) == {}
    assert ad["x"].tolist() == [1.0] * 64
    with pytest.raises(AliasingError, match="debug_aliasing"):
        written_since(td)


def test_nothing_is_recorded_while_it_is_off():
    """Off at first, and again after a block, whether it raised or not; blocks may be nested."""
    x, kept = torch.ones(4), []
    with pytest.raises(ValueError, match="own"), debug_aliasing():  # noqa: PT012
        kept.append(to_jax(x))
        x.zero_()
        raise ValueError("own")  # and no AliasingError in its place
    with pytest.raises(ValueError, match="enabled is True or False, got 'off'"):
        debug_aliasing("off")  # pyright: ignore[reportArgumentType]
    x, kept = torch.ones(4), [to_jax(torch.ones(4))]
    with debug_aliasing(False):
        with debug_aliasing():
            pass
        kept.append(to_jax(x))
    with pytest.raises(AliasingError, match="no leaf of this tree was recorded"):
        written_since([x, kept])


def test_a_record_keeps_no_memory_alive():
    """The memory goes with the last of tensor and array; a new leaf is not taken for an old one."""
    raw = torch.zeros(64).numpy()
    watch = weakref.ref(raw)
    with debug_aliasing():
        first = torch.from_numpy(raw)
        array = to_jax(first, copy=False)
        second = to_torch([array])[0]
    del raw, first, array
    gc.collect(1)
    assert second.tolist() == [0.0] * 64
    del second
    gc.collect(1)
    assert watch() is None
    with pytest.raises(AliasingError, match="no leaf of this tree was recorded"):
        written_since([torch.zeros(64) for _ in range(100)])


def test_every_tree_crosses_unchanged_under_the_switch():
    """No false alarm on any tree of the zoo, there and back, all of them recorded at once."""
    kept = []
    with debug_aliasing(), jax.enable_x64(True):
        for name, make in zoo.TREES.items():
            ad = to_jax(make())
            kept.append((ad, to_torch(ad)))
            for path, values in zoo.expected(name).items():
                assert zoo.same_bits(zoo.as_numpy(zoo.leaves(kept[-1][1])[path]), values)
    assert len(kept) == len(zoo.TREES)
