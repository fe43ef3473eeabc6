"""Batches of every kind of source arrive whole, in order, in the framework asked for."""

import copy
import gc
import pickle
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from tensordict import TensorClass, TensorDict
from torch.utils.data import DataLoader

import tdbridge
from tdbridge import ArrayDict, PackedArrayDict, Precision
from tdbridge.errors import LeafTypeError, LoaderError, NarrowingError
from tdbridge.loaders import Loader, Rows
from tests.zoo import as_numpy

DEPTHS = [0, 1, 2, 5]
N = 6


class Step(TensorClass):
    x: torch.Tensor
    label: str


@dataclass
class Record:
    x: Any
    note: str


class Pair(NamedTuple):
    x: Any
    y: Any


def values(i: int) -> np.ndarray:
    return np.arange(12, dtype=np.float32).reshape(4, 3) + 100 * i


def tensordict(i: int) -> TensorDict:
    y = torch.arange(4, dtype=torch.int32) + i
    return TensorDict({"x": torch.from_numpy(values(i)), "n": {"y": y}}, [4], names=["time"])


KINDS: dict[str, Any] = {
    "tensordict": tensordict,
    "tensorclass": lambda i: Step(x=torch.from_numpy(values(i)), label=f"s{i}", batch_size=[4]),
    "arraydict": lambda i: tdbridge.to_jax(tensordict(i)),
    "dict of numpy": lambda i: {"x": values(i)},
    "dict of tensors": lambda i: {"x": torch.from_numpy(values(i))},
    "dataclass": lambda i: Record(values(i), "note"),
    "namedtuple": lambda i: Pair(values(i), [torch.ones(2) * i]),
}


def x_of(batch: Any) -> Any:
    return batch["x"] if isinstance(batch, (dict, TensorDict, ArrayDict)) else batch.x


@pytest.mark.parametrize("prefetch", DEPTHS)
@pytest.mark.parametrize("to", ["torch", "jax", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_comes_once_and_in_order(kind: str, to: Any, prefetch: int):
    loader = Loader([KINDS[kind](i) for i in range(N)], to=to, prefetch=prefetch)
    for _ in range(2):
        found = list(loader)
        assert len(found) == N
        for i, batch in enumerate(found):
            for part in batch if to == "both" else [batch]:
                np.testing.assert_array_equal(np.asarray(x_of(part)), values(i))
    assert len(loader) == N


def test_a_batch_is_what_it_was_in_its_framework():
    given = [tensordict(0)]
    (td,) = Loader(given)
    assert td is given[0]
    (ad,) = Loader([tensordict(1)], to="jax")
    assert isinstance(ad, ArrayDict)
    assert ad.names == ["time"]
    assert ad.batch_size == (4,)
    (step,) = Loader([KINDS["tensorclass"](2)], to="jax")
    assert step.tensorclass is Step
    assert step.label == "s2"
    (back,) = Loader([step])
    assert isinstance(back, Step)
    (record,) = Loader([Record(values(0), "a note")], to="jax")
    assert isinstance(record, Record)
    assert record.note == "a note"
    assert isinstance(record.x, jax.Array)
    (pair,) = Loader([KINDS["namedtuple"](1)], to="torch")
    assert isinstance(pair, Pair)
    assert isinstance(pair.x, torch.Tensor)


# --- memory


def aligned(i: int) -> TensorDict:
    return tdbridge.consolidate(tensordict(i))


@pytest.mark.parametrize("packed", [False, True])
def test_on_the_cpu_jax_has_the_memory_of_the_source(packed: bool):
    given = [aligned(i) for i in range(3)]
    for td, ad in zip(given, Loader(given, to="jax", packed=packed), strict=True):
        assert isinstance(ad, PackedArrayDict if packed else ArrayDict)
        assert ad["x"].unsafe_buffer_pointer() == td["x"].data_ptr()
        np.testing.assert_array_equal(ad["n", "y"], as_numpy(td["n", "y"]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("make", [tensordict, aligned])
def test_both_are_over_the_same_memory(make: Any, packed: bool):
    for i, (td, ad) in enumerate(Loader([make(i) for i in range(3)], to="both", packed=packed)):
        assert isinstance(td, TensorDict)
        assert td.batch_size == (4,)
        for key in ("x", ("n", "y")):
            assert td[key].data_ptr() == ad[key].unsafe_buffer_pointer()
        np.testing.assert_array_equal(ad["x"], values(i))
        np.testing.assert_array_equal(as_numpy(td["x"]), values(i))


def test_both_packs_the_tensordicts_in_another_batch():
    y = torch.arange(13, dtype=torch.float32)[1:]
    ((t, a),) = Loader([{"td": tensordict(1), "y": y, "n": 3}], to="both", packed=True)
    assert isinstance(t["td"], TensorDict)
    assert isinstance(a["td"], PackedArrayDict)
    assert t["td"]["x"].data_ptr() == a["td"]["x"].unsafe_buffer_pointer()
    assert t["y"].data_ptr() == a["y"].unsafe_buffer_pointer()
    np.testing.assert_array_equal(a["td"]["x"], values(1))
    assert t["y"].tolist() == a["y"].tolist() == y.tolist()
    assert t["n"] == a["n"] == 3


def test_both_of_what_is_not_aligned_are_over_the_copy():
    source = torch.arange(13, dtype=torch.float32)[1:]
    assert source.data_ptr() % 64
    ((t, a),) = Loader([(source, "text")], to="both")
    assert t[0].data_ptr() == a[0].unsafe_buffer_pointer() != source.data_ptr()
    assert t[0].tolist() == a[0].tolist() == source.tolist()
    assert (t[1], a[1]) == ("text", "text")


def test_both_keep_a_label_that_jax_narrows_in_its_own_dtype():
    labels = torch.tensor([1, 2, 2**31 - 1])
    ((t, a),) = Loader([{"label": labels}], to="both")
    assert t["label"] is labels
    assert a["label"].dtype == "int32"
    assert a["label"].tolist() == labels.tolist()


def test_both_gives_one_tensor_for_tied_leaves():
    x = torch.ones(64)
    ((t, a),) = Loader([{"x": x, "y": x}], to="both")
    assert t["x"] is t["y"] is x
    assert a["x"] is a["y"]


@pytest.mark.parametrize("prefetch", DEPTHS)
@pytest.mark.parametrize("to", ["torch", "jax", "both"])
@pytest.mark.parametrize("options", [{}, {"packed": True}, {"cast": "bfloat16"}])
def test_every_batch_that_is_kept_stays_what_it_was(to: Any, prefetch: int, options: Any):
    if to == "torch" and "packed" in options:
        options = {}

    def source() -> Iterator[TensorDict]:
        for i in range(20):
            yield tensordict(i)  # memory that is free, and taken again, as soon as nobody has it

    kept = []
    for batch in Loader(source, to=to, prefetch=prefetch, **options):
        kept.append(batch)
        time.sleep(0.001)  # a consumer that is slower than the source
    gc.collect()
    assert len(kept) == 20
    for i, batch in enumerate(kept):
        for part in batch if to == "both" else [batch]:
            found = part["x"]
            found = as_numpy(found) if isinstance(found, torch.Tensor) else np.asarray(found)
            wanted = values(i)
            wanted = wanted.astype(ml_dtypes.bfloat16) if "cast" in options else wanted
            np.testing.assert_array_equal(found, wanted)


def test_a_source_that_writes_over_its_batch_is_served_by_a_transform_that_copies():
    buffer = tensordict(0)

    def source() -> Iterator[TensorDict]:
        for i in range(5):
            buffer["x"].copy_(torch.from_numpy(values(i)))
            yield buffer

    batches = list(Loader(source, to="jax", prefetch=3, transform=lambda batch: batch.clone()))
    for i, batch in enumerate(batches):
        np.testing.assert_array_equal(batch["x"], values(i))


# --- what is done on the way


def test_the_cast_is_that_of_tdbridge():
    (td,) = Loader([tensordict(1)], cast=torch.bfloat16)
    assert td["x"].dtype == torch.bfloat16
    assert td["n", "y"].dtype == torch.int32
    (ad,) = Loader([{"x": values(1), "keep": values(1)}], to="jax", cast=Precision(keep="keep"))
    assert ad["x"].dtype == "bfloat16"
    assert ad["keep"].dtype == "float32"
    np.testing.assert_array_equal(ad["x"], values(1).astype(ml_dtypes.bfloat16))


def test_a_transform_gets_the_batch_of_the_source_before_it_is_cast():
    seen = []

    def transform(batch: Any) -> Any:
        seen.append((type(batch), batch["x"].dtype, threading.current_thread().name))
        return {"y": batch["x"] * 2}

    (batch,) = Loader([{"x": values(1)}], to="jax", transform=transform, cast="bfloat16")
    assert seen == [(dict, np.dtype("float32"), "tdbridge-loader")]
    np.testing.assert_array_equal(batch["y"], (values(1) * 2).astype(ml_dtypes.bfloat16))


def test_a_device_and_a_sharding_place_the_batch():
    devices = jax.devices("cpu")
    (batch,) = Loader([tensordict(0)], to="jax", device=devices[3])
    assert batch["x"].devices() == {devices[3]}
    assert batch["x"].committed
    mesh = jax.make_mesh((4,), ("data",), devices=devices[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    for i, batch in enumerate(
        Loader([tensordict(i) for i in range(3)], to="jax", sharding=sharding)
    ):
        assert batch["x"].sharding == batch["n", "y"].sharding == sharding
        np.testing.assert_array_equal(batch["x"], values(i))
        shards = [np.asarray(shard.data) for shard in batch["x"].addressable_shards]
        np.testing.assert_array_equal(np.concatenate(shards), values(i))


def test_a_packed_batch_is_one_transfer_per_dtype():
    device = jax.devices("cpu")[2]
    (batch,) = Loader([tensordict(0)], to="jax", device=device, packed=True)
    assert [segment.dtype.name for segment in batch.segments] == ["float32", "int32"]
    assert all(segment.devices() == {device} for segment in batch.segments)
    np.testing.assert_array_equal(batch["x"], values(0))


def test_x64_is_that_of_the_consumer():
    with jax.enable_x64(True):
        (batch,) = Loader([{"x": torch.tensor([2**40])}], to="jax")
    assert batch["x"].dtype == "int64"
    assert batch["x"].tolist() == [2**40]
    with pytest.raises(NarrowingError, match="x"):
        list(Loader([{"x": torch.tensor([2**40])}], to="jax"))


def test_narrow_is_that_of_to_jax():
    batches = [{"x": torch.tensor([0.1], dtype=torch.float64)}]
    with pytest.raises(NarrowingError):
        next(iter(Loader(batches, to="jax")))
    for to in ("jax", "both"):
        (batch,) = Loader([*batches], to=to, narrow="allow")
        found = batch[1] if to == "both" else batch
        assert found["x"].dtype == "float32"
        assert float(found["x"][0]) == float(np.float32(0.1))


# --- epochs


def test_each_epoch_iterates_anew_also_after_a_break():
    loader = Loader([torch.tensor([i]) for i in range(4)])
    for batch in loader:
        if int(batch) == 1:
            break
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    assert loader.state_dict()["epoch"] == 2


def test_a_new_iteration_ends_the_one_before():
    loader = Loader([torch.tensor([i]) for i in range(4)])
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(LoaderError, match="by a newer one of the same Loader"):
        next(first)
    assert [int(batch) for batch in second] == [0, 1, 2, 3]
    iter(loader)
    assert list(second) == []  # which was at its end


class Slow:
    """Is in the middle of its second batch for a while, and there but once."""

    def __init__(self) -> None:
        self.go, self.inside, self.most = threading.Event(), 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            yield torch.tensor([0])
            self.go.wait(30)
            yield torch.tensor([1])
        finally:
            self.inside -= 1


def test_a_source_is_gone_through_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tdbridge.loaders.prefetch.PATIENCE", 0.01)
    source = Slow()
    loader = Loader(source)
    next(iter(loader))  # which is collected, and its thread goes on
    later = threading.Timer(0.2, source.go.set)
    later.start()
    assert [int(batch) for batch in loader] == [0, 1]
    assert source.most == 1
    later.join()


def test_an_iterator_has_one_epoch():
    loader = Loader(torch.tensor([i]) for i in range(3))
    assert [int(batch) for batch in loader] == [0, 1, 2]
    with pytest.raises(LoaderError, match="a function that returns a new iterator"):
        iter(loader)


def test_a_function_is_called_for_each_epoch():
    loader = Loader(lambda: (torch.tensor([i]) for i in range(3)))
    for _ in range(3):
        assert [int(batch) for batch in loader] == [0, 1, 2]
    with pytest.raises(TypeError, match="len"):
        len(loader)


def test_an_empty_source_has_an_empty_epoch():
    loader = Loader([])
    assert list(loader) == list(loader) == []
    assert loader.state_dict()["epoch"] == 2


def test_two_loaders_over_one_source_are_refused():
    source = DataLoader(range(4))  # pyright: ignore[reportArgumentType]
    first = Loader(source)
    with pytest.raises(LoaderError, match=r'another Loader .* to="both" .* close\(\)'):
        Loader(source, to="jax")
    first.close()
    second = Loader(source, to="jax")
    assert len(list(second)) == 4
    with pytest.raises(LoaderError, match="was closed"):
        iter(first)
    del second
    assert len(list(Loader(source))) == 4


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_has_no_copy(duplicate: Any):
    loader = Loader([torch.tensor([0])])
    with pytest.raises(LoaderError, match="cannot be copied or pickled"):
        duplicate(loader)
    assert len(list(loader)) == 1


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_comes_at_its_batch_with_its_traceback(prefetch: int):
    def source() -> Iterator[Any]:
        yield torch.tensor([0])
        yield torch.tensor([1])
        raise OSError("the disk is gone")

    loader = Loader(source, prefetch=prefetch)
    found = iter(loader)
    assert [int(next(found)), int(next(found))] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone") as error:
        next(found)
    assert error.traceback[-1].name == "source"
    assert list(found) == []
    assert loader.state_dict()["batch"] == 2


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_transform_that_runs_out_does_not_end_the_epoch(prefetch: int):
    added = iter([1, 2])
    found = iter(Loader([10, 20, 30], prefetch=prefetch, transform=lambda i: i + next(added)))
    assert [next(found), next(found)] == [11, 22]
    with pytest.raises(LoaderError, match=r"a batch was lost: .* raised StopIteration"):
        next(found)


def test_a_leaf_that_cannot_cross_is_named():
    loader = Loader([{"x": torch.ones(2)}, {"x": torch.ones(2).to_sparse()}], to="jax")
    found = iter(loader)
    next(found)
    with pytest.raises(LeafTypeError, match=r"\['x'\].*sparse"):
        next(found)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"to": "numpy"}, 'to is "torch", "jax" or "both", got \'numpy\''),
        ({"prefetch": -1}, "prefetch is a number of batches, 0 or more, got -1"),
        ({"prefetch": 1.5}, "prefetch is a number of batches, 0 or more, got 1.5"),
        ({"packed": True}, 'packed is for to="jax" and to="both"'),
        ({"sharding": object()}, 'sharding is for to="jax"'),
        ({"to": "jax", "sharding": object(), "device": "cpu"}, "not both"),
        ({"to": "jax", "device": torch.device("cpu")}, "device is a jax.Device or the name"),
        ({"to": "jax", "narrow": "wrap"}, "narrow is"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments: Any, text: str):
    source = [torch.ones(1)]
    with pytest.raises(ValueError, match=re.escape(text)):
        Loader(source, **arguments)
    Loader(source)  # which nobody has taken


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (3, "got a int to load from"),
        (tensordict(0), r"got a TensorDict, which is one batch: pass \[batch\]"),
        (tdbridge.to_jax(tensordict(0)), "got a ArrayDict, which is one batch"),
        ({"x": torch.ones(2)}, "got a dict, which is one batch"),
        (torch.ones(2), "got a Tensor, which is one batch"),
        (np.ones(2), "got a ndarray, which is one batch"),
        ("train", "got a str, which holds no batches"),
        (Rows(tensordict(0)), r"got a Rows, which has single rows: pass a DataLoader over it"),
    ],
)
def test_what_gives_no_batches_is_refused(source: Any, text: str):
    with pytest.raises(LoaderError, match=text):
        Loader(source)


def test_a_dtype_that_cannot_be_cast_to_is_refused_at_once():
    with pytest.raises(LeafTypeError, match="int32"):
        Loader([torch.ones(1)], cast=torch.int32)


def test_a_progress_bar_is_shown_and_goes(capsys: pytest.CaptureFixture[str]):
    before = threading.active_count()
    loader = Loader([torch.ones(1)] * 4, progress=True)
    assert len(list(loader)) == 4
    assert "4/4" in capsys.readouterr().err
    for _ in loader:
        break
    deadline = time.monotonic() + 30  # rich does not wait for its thread
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
