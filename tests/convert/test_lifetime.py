"""Either side may go first, and memory is neither freed under a reader nor kept for ever."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdbridge import to_jax, to_torch
from tests import zoo
from tests.convert.trees import address, pairs, x64_for

SIZE = 2**16


def overwrite_freed_memory() -> None:
    """Fills the blocks that were just freed, so that a reader of them would see it."""
    blocks = [torch.full((SIZE,), -1.0) for _ in range(4)]
    small = [torch.full((n,), -1.0) for n in (1, 3, 16, 64) for _ in range(32)]
    del blocks, small


@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("name", zoo.TREES)
def test_the_tensors_may_go_first(name: str, copy: bool | None):
    """An ArrayDict outlives the TensorDict that it was made from."""
    td = zoo.TREES[name]()
    with x64_for(name):
        ad = to_jax(td, copy=copy)
    del td
    gc.collect(1)
    overwrite_freed_memory()
    for path, values in zoo.expected(name).items():
        assert zoo.same_bits(np.asarray(ad[path]), values)


@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("name", zoo.TREES)
def test_the_arrays_may_go_first(name: str, copy: bool | None):
    """A TensorDict outlives the ArrayDict that it was made from, and the tensors before that."""
    with x64_for(name):
        ad = to_jax(zoo.TREES[name](), copy=copy)
    td = to_torch(ad, copy=copy)
    del ad
    gc.collect(1)
    overwrite_freed_memory()
    expected = zoo.expected(name)
    for path, tensor in zoo.leaves(td).items():
        assert zoo.same_bits(zoo.as_numpy(tensor), expected[path])


def test_a_deleted_array_leaves_its_source_alone():
    """`array.delete()` ends the array and not the tensor that it was made from."""
    source = torch.arange(float(SIZE))
    to_jax(source).delete()
    overwrite_freed_memory()
    assert torch.equal(source, torch.arange(float(SIZE)))


DELETE = """
import jax.numpy as jnp
import torch
from tdbridge import to_jax, to_torch

for array in (to_jax(torch.arange(64.0)), jnp.arange(64.0) * 1.0):
    tree = {"x": array}
    tensor = to_torch(tree)["x"]
    array.delete()
    assert array.is_deleted()
    blocks = [torch.full((64,), -1.0) for _ in range(64)]
    assert torch.equal(tensor, torch.arange(64.0))
print("done")
"""


def test_a_deleted_array_leaves_a_tensor_over_it_alone():
    """`array.delete()` ends the array and not the tensors over it, nor (XLA might) the process."""
    done = subprocess.run(
        [sys.executable, "-c", DELETE], capture_output=True, text=True, check=False
    )
    assert done.stdout == "done\n", done.stderr[-2000:]


EXPORTED: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.arange(64.0),
    "bfloat16": lambda: torch.arange(64).bfloat16(),
    "float8": lambda: torch.ones(64).to(torch.float8_e5m2),
    "bool": lambda: torch.ones(64, dtype=torch.bool),
    "parameter": lambda: torch.nn.Parameter(torch.ones(64)),
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_a_resize_of_shared_memory_raises(kind: str):
    """A storage that JAX reads cannot be resized: torch raises instead of freeing it."""
    tensor = EXPORTED[kind]()
    array = to_jax({"x": tensor}, copy=False)["x"]
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.detach().resize_(10_000)
    assert address(array) == address(tensor)
    assert array.shape == (64,)


def test_a_copied_storage_can_still_be_resized():
    """copy=True exports nothing of the source: FSDP and its like may free it."""
    tensor = torch.arange(64.0)
    array = to_jax(tensor, copy=True)
    tensor.untyped_storage().resize_(0)
    overwrite_freed_memory()
    assert array.tolist() == list(range(64))


REPLACED: dict[str, Callable[[torch.Tensor], Any]] = {
    "set_": lambda tensor: tensor.set_(torch.zeros(3)),  # pyright: ignore[reportArgumentType]
    "data": lambda tensor: setattr(tensor, "data", torch.zeros(3)),
    "swap": lambda tensor: torch.utils.swap_tensors(tensor, torch.zeros(3)),
}


@pytest.mark.parametrize("how", REPLACED)
def test_other_memory_for_the_source_does_not_dangle(how: str):
    """`set_`, `.data =` and swap_tensors give the tensor other memory: the array keeps the old."""
    tensor = torch.arange(float(SIZE))
    array = to_jax(tensor, copy=False)
    REPLACED[how](tensor)
    assert tensor.tolist() == [0, 0, 0]
    overwrite_freed_memory()
    assert np.array_equal(np.asarray(array), np.arange(SIZE, dtype=np.float32))


def test_the_memory_is_freed_with_its_last_reader():
    """A numpy array that crossed is kept by the jax array, and let go with it."""

    raw = torch.zeros(SIZE).numpy()
    watch = weakref.ref(raw)
    array = to_jax({"x": raw}, copy=False)["x"]
    del raw
    gc.collect(1)
    assert watch() is not None
    del array
    gc.collect(1)
    assert watch() is None


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


@pytest.mark.parametrize("copy", [None, True])
def test_many_conversions_leave_the_memory_flat(copy: bool | None):
    """Ten thousand conversions do not grow the process: 16 kB lost in each would be 160 MB."""

    def round_trip() -> None:
        td = TensorDict({"x": torch.ones(64, 64), "off": torch.ones(4097)[1:]}, [])
        assert to_torch(to_jax(td, copy=copy), copy=copy)["x"].shape == (64, 64)

    for _ in range(500):
        round_trip()
    gc.collect(1)
    before = resident_megabytes()
    for _ in range(5_000):
        round_trip()
    gc.collect(1)
    assert resident_megabytes() - before < 8


def test_a_hundred_thousand_conversions_leave_the_memory_flat():
    """Nothing at all is left of a conversion: 160 bytes lost in each would be 16 MB."""
    tree = {"x": torch.ones(16)}

    def round_trips(count: int) -> None:
        for _ in range(count):
            to_torch(to_jax(tree))

    round_trips(2_000)
    gc.collect(1)
    before = resident_megabytes()
    round_trips(50_000)
    gc.collect(1)
    assert resident_megabytes() - before < 8


def test_many_shapes_leave_the_memory_flat():
    """A new shape at each call does not grow the process beyond what a bounded cache holds."""
    for count in range(1, 5_000):
        to_jax(torch.ones(count))
    gc.collect(1)
    before = resident_megabytes()
    for count in range(5_000, 10_000):
        to_jax(torch.ones(count))
    gc.collect(1)
    assert resident_megabytes() - before < 8


def test_four_threads_convert_at_once():
    """Conversions from several threads, each with its own x64 mode, do not disturb each other."""
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(index: int) -> None:
        try:
            start.wait()
            for i in range(60):
                value = 1000 * index + i
                td = TensorDict({"x": torch.full((64,), value), "n": {"y": torch.ones(8, 8)}}, [])
                with jax.enable_x64(index % 2 == 0):
                    ad = to_jax(td)
                assert ad["x"].dtype == ("int64" if index % 2 == 0 else "int32")
                back = to_torch(ad)
                assert back["x"].tolist() == [value] * 64
                for _, tensor, array in pairs(back, ad):
                    assert address(tensor) == address(array)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
