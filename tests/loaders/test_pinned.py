"""How a batch gets to a device: which way, in how many transfers, over what memory."""

import gc
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, is_tensor_collection
from torch.utils.data import DataLoader, Dataset

from tdbridge import ArrayDict, LeafTypeError, consolidate
from tdbridge.loaders.pinned import Uploads
from tests import zoo
from tests.layout.check import assert_leaves_in_one_buffer, assert_same_leaves, inner_of
from tests.loaders.late import LateSide

CPU = torch.device("cpu")


def uploads_to(side: LateSide, slots: int = 2) -> Uploads:
    return Uploads(CPU, slots, side)


def pinned_leaves(side: LateSide, td: Any) -> Any:
    """As `DataLoader(pin_memory=True)` leaves it: every leaf pinned by itself."""
    td = td.clone()
    side.elsewhere += list(td.values(True, True))
    return td


def batch_of(number: int, size: int = 4) -> TensorDict:
    x = torch.full((size, 3), float(number))
    return TensorDict({"x": x, "n": {"y": torch.arange(size) + number}}, [size])


def assert_batch(td: TensorDict, number: int, size: int = 4) -> None:
    np.testing.assert_array_equal(td["x"].numpy(), np.full((size, 3), number, np.float32))
    np.testing.assert_array_equal(td["n", "y"].numpy(), np.arange(size) + number)


# --- tensordicts


@pytest.mark.parametrize("name", zoo.TREES)
@pytest.mark.parametrize("made", [lambda td: td, consolidate], ids=["loose", "consolidated"])
def test_a_tree_arrives_consolidated_by_one_transfer(name, made):
    side = LateSide()
    found = uploads_to(side)(made(zoo.TREES[name]()))()
    assert_same_leaves(found, zoo.expected(name))
    assert len(side.transfers) == len(side.pinned) == 1
    assert found.is_consolidated()
    assert found.is_locked
    assert_leaves_in_one_buffer(found)


@pytest.mark.parametrize("name", ["nested", "tensorclass_inside", "non_tensors", "empty_inside"])
def test_every_node_says_that_it_is_on_the_device(name):
    """As after `td.to(device)`; classes, batch sizes, names and values are kept."""
    source = zoo.TREES[name]()
    found = uploads_to(LateSide())(source)()
    expected, nodes = zoo.nodes(source.to(CPU)), zoo.nodes(found)
    assert set(nodes) == set(expected)
    for path, node in expected.items():
        other = nodes[path]
        assert type(other) is type(node)
        assert (other.batch_size, other.names) == (node.batch_size, node.names)
        assert other.device == node.device == CPU
        others = {k: v for k, v in inner_of(node).items() if not is_tensor_collection(v)}
        assert set(others) <= set(inner_of(other).keys())


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_batches_received_late_are_as_they_were_sent(slots):
    """The consumer takes none of them before all are sent; the last one is smaller."""
    side = LateSide()
    uploads = uploads_to(side, slots)
    sizes = [4] * 9 + [2]
    receives = [uploads(batch_of(i, size)) for i, size in enumerate(sizes)]
    for i, (receive, size) in enumerate(zip(receives, sizes, strict=True)):
        assert_batch(receive(), i, size)
    assert len(side.transfers) == 10
    assert len(side.pinned) == slots


def test_a_source_may_be_written_to_as_soon_as_the_call_returns():
    uploads, td = uploads_to(LateSide()), batch_of(1)
    for source in (td, consolidate(td)):
        receive = uploads(source)
        source["x"].zero_()
        assert receive()["x"].eq(1).all()
        source["x"].fill_(1)


def test_a_consolidated_pinned_tree_is_one_transfer_and_no_slot():
    side = LateSide()
    td = consolidate(batch_of(5))
    side.elsewhere.append(td["x"])
    found = uploads_to(side)(td)()
    assert_batch(found, 5)
    assert found.is_consolidated()
    # x: 4 * 3 * 4 bytes, y: 4 * 8 bytes, each padded to 64
    assert side.transfers == [128]
    assert side.pinned == []


def test_leaves_that_are_pinned_already_are_not_pinned_again():
    side = LateSide()
    found = uploads_to(side)(pinned_leaves(side, batch_of(6)))()
    assert_batch(found, 6)
    assert (found.device, found["n"].device) == (CPU, CPU)
    assert sorted(side.transfers) == [32, 48]
    assert side.pinned == []


def test_pinned_memory_is_kept_until_its_copy_is_done_and_no_longer():
    side = LateSide()
    uploads = uploads_to(side)
    receives = [uploads(pinned_leaves(side, batch_of(i))) for i in range(3)]
    side.elsewhere.clear()
    gc.collect()
    for i, receive in enumerate(receives):  # the device fails if the memory is gone
        assert_batch(receive(), i)
    uploads(pinned_leaves(side, batch_of(3)))
    assert len(uploads._kept) == 1
    uploads.close()
    assert not side.queue
    assert not uploads._kept


def test_a_tree_that_is_pinned_in_part_is_not_pinned_again_either():
    side = LateSide()
    td = batch_of(7)
    side.elsewhere.append(td["x"])
    found = uploads_to(side)(td)()
    assert_batch(found, 7)
    assert side.transfers == [48, 64]
    assert len(side.pinned) == 1


def test_a_tree_on_the_device_is_left_as_it_is():
    side = LateSide()
    uploads = uploads_to(side)
    there = uploads(batch_of(8))()
    again = uploads(there)()
    assert again is there
    assert len(side.transfers) == 1


def test_leaves_on_the_device_are_left_and_the_others_are_sent():
    side = LateSide()
    uploads = uploads_to(side)
    there = uploads(torch.arange(5))()
    found = uploads(TensorDict(a=there, b=torch.ones(2)))()
    assert found["a"].data_ptr() == there.data_ptr()
    assert found["b"].tolist() == [1, 1]
    assert side.transfers == [64, 64]


def test_an_arraydict_of_numpy_arrives_as_a_tensordict():
    found = uploads_to(LateSide())(ArrayDict({"x": np.arange(6).reshape(3, 2)}, [3]))()
    assert type(found) is TensorDict
    assert found.batch_size == (3,)
    np.testing.assert_array_equal(found["x"].numpy(), np.arange(6).reshape(3, 2))


# --- other pytrees

Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    x: torch.Tensor
    name: str


def test_containers_and_what_is_no_array_are_kept():
    side = LateSide()
    tree = {
        "t": (torch.arange(3), None, "text"),
        "pair": Pair(np.array([1, 2], np.float32), 7),
        "record": Record(torch.ones(2, 2), "one"),
        "td": batch_of(9),
        "none": torch.zeros(0, 5),
    }
    found = uploads_to(side)(tree)()
    assert found["t"][0].tolist() == [0, 1, 2]
    assert found["t"][1:] == (None, "text")
    assert found["pair"].first.tolist() == [1, 2]
    assert found["pair"].second == 7
    assert found["record"].x.tolist() == [[1, 1], [1, 1]]
    assert found["record"].name == "one"
    assert_batch(found["td"], 9)
    assert found["td"].device == CPU
    assert found["none"].shape == (0, 5)
    assert len(side.transfers) == len(side.pinned) == 1


def test_a_bare_tensor_or_array_is_a_batch():
    uploads = uploads_to(LateSide())
    for batch in (torch.arange(4), np.arange(4), np.arange(3, -1, -1)[::-1], torch.arange(4.0)):
        assert uploads(batch)().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("batch", [{}, (), {"a": "text", "b": [None, 3]}], ids=str)
def test_a_tree_without_arrays_is_left_as_it_is(batch):
    side = LateSide()
    assert uploads_to(side)(batch)() == batch
    assert side.transfers == []


def test_one_tensor_at_two_places_is_sent_once_and_stays_one():
    side = LateSide()
    x = torch.arange(3)
    found = uploads_to(side)({"a": x, "b": x})()
    assert found["a"] is found["b"]
    assert side.transfers == [64]


def test_pinned_and_pageable_tensors_of_one_tree_go_their_own_ways():
    side = LateSide()
    x = torch.arange(4)
    side.elsewhere.append(x)
    found = uploads_to(side)([x, np.arange(3), x.reshape(2, 2).T])()
    assert [leaf.tolist() for leaf in found] == [[0, 1, 2, 3], [0, 1, 2], [[0, 2], [1, 3]]]
    assert side.transfers == [32, 128]  # the transposed one has to be written anew


@pytest.mark.parametrize("name", sorted({*zoo.KINDS} - {"params", "params_inside"}))
def test_trees_of_every_kind_arrive_alone_and_in_a_container(name):
    """Lazy stacks, jagged and unbatched tensors: in one transfer each time."""
    side = LateSide()
    uploads = uploads_to(side)
    expected = zoo.described(zoo.KINDS[name]())
    assert zoo.described(uploads(zoo.KINDS[name]())()) == expected
    assert len(side.transfers) == 1
    assert zoo.described(uploads([zoo.KINDS[name]()])()[0]) == expected
    assert len(side.transfers) <= 2  # of a list without any tensor, none


def test_parameters_arrive_as_a_tensordict():
    """As `consolidate` gives them: detached, in one buffer."""
    found = uploads_to(LateSide())(zoo.params())()
    assert type(found) is TensorDict
    assert found.is_consolidated()
    assert zoo.described(found)[1:] == zoo.described(zoo.params())[1:]


def test_a_jagged_tensor_is_a_batch():
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    side = LateSide()
    found = uploads_to(side)(jagged)()
    assert [row.tolist() for row in found.unbind()] == [[1, 1], [0, 0, 0]]
    assert len(side.transfers) == 1


# --- what fails


def test_a_leaf_that_is_not_dense_is_named():
    uploads = uploads_to(LateSide())
    with pytest.raises(LeafTypeError, match=r"\['a', 's'\]: got a tensor of layout torch.sparse"):
        uploads({"a": {"s": torch.eye(2).to_sparse()}})
    with pytest.raises(LeafTypeError, match=r"\['s'\]: got a numpy array of dtype|\['s'\]: .*<U1"):
        uploads({"s": np.array(["a"])})


@pytest.mark.parametrize("slots", [1, 2])
def test_after_a_copy_that_failed_the_next_ones_arrive(slots):
    side = LateSide()
    uploads = uploads_to(side, slots)
    first = uploads(batch_of(0))
    side.fails = True
    with pytest.raises(RuntimeError, match="the copy failed"):
        uploads(batch_of(1))
    side.fails = False
    receives = [first, *(uploads(batch_of(i)) for i in range(1, 6))]
    for i, receive in enumerate(receives):
        assert_batch(receive(), i)


# --- on a GPU


def slow_sum(td: TensorDict, work: torch.Tensor) -> torch.Tensor:
    """Reads the batch long after it was given."""
    for _ in range(20):
        work = work @ work * 0
    return td["x"].sum() + work.sum() + td["n", "y"].sum()


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("kind", ["loose", "consolidated", "pinned"])
def test_many_batches_under_a_slow_kernel(slots, kind):
    """Memory of earlier batches is reused, on the host and on the device, and no value changes."""
    make = {
        "loose": lambda td: td,
        "consolidated": consolidate,
        "pinned": lambda td: td.pin_memory(),
    }
    uploads = Uploads(torch.device("cuda"), slots)
    work = torch.ones(2048, 2048, device="cuda")
    size = 50_000
    sums = []
    for i in range(40):
        td = uploads(make[kind](batch_of(i, size)))()
        assert td.device == td["x"].device == work.device
        sums.append(slow_sum(td, work))
    expected = [3 * size * i + size * (size - 1) // 2 + size * i for i in range(40)]
    np.testing.assert_allclose(torch.stack(sums).cpu().numpy(), expected, rtol=1e-5)


@pytest.mark.gpu
def test_the_copy_is_of_pinned_memory_on_another_stream():
    from torch.profiler import ProfilerActivity, profile

    uploads, td = Uploads(torch.device("cuda"), 2), batch_of(1, 1000)
    uploads(td)()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        uploads(td)()
        torch.cuda.synchronize()
    assert [e.name for e in seen.events() or () if "HtoD" in e.name] == [
        "Memcpy HtoD (Pinned -> Device)"
    ]


class Batches(Dataset):
    def __init__(self, made: Any) -> None:
        self.made = made

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        return self.made(batch_of(i))


@pytest.mark.gpu
@pytest.mark.parametrize("made", [lambda td: td, consolidate], ids=["loose", "consolidated"])
def test_batches_of_a_dataloader_that_pins(made):
    """tensordict pins leaf by leaf: what was consolidated arrives as a plain tree."""
    loader = DataLoader(Batches(made), batch_size=None, collate_fn=lambda td: td, pin_memory=True)
    uploads = Uploads(torch.device("cuda"), 2)
    for i, td in enumerate(loader):
        found = uploads(td)()
        assert found.device is not None
        assert found.device.type == "cuda"
        assert_batch(found.cpu(), i)
    assert not uploads._ring._given


@pytest.mark.gpu
def test_a_consolidated_pinned_tree_arrives_consolidated():
    from tdbridge.layout.buffer import declare, placement_for, views_of
    from tdbridge.layout.tree import rebuild, tree_of

    td = consolidate(batch_of(3))
    placement = placement_for(td)
    assert placement is not None
    plan, storage = placement.plan, placement.storage.pin_memory()
    views = views_of(plan.layout, storage)
    new = rebuild(tree_of(td), iter([views[i] for i in plan.order]))
    pinned = declare(new, tree_of(td), plan, storage, views)
    uploads = Uploads(torch.device("cuda"), 2)
    found = uploads(pinned)()
    assert found.is_consolidated()
    assert_batch(found.cpu(), 3)
    assert not uploads._ring._given
