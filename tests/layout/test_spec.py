"""Layout: arithmetic of places, equality, hash, JSON."""

import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from tdbridge import Layout, LeafSpec, NodeSpec, Segment, layout_of
from tdbridge.errors import LayoutError
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.spec import make_layout
from tests import zoo
from tests.layout.check import places

JSON_TREES = [name for name in zoo.TREES if name != "non_tensors"]


@pytest.mark.parametrize("name", zoo.TREES)
def test_each_leaf_has_its_place(name):
    """Leaves go by dtype name, then by path, each on the next multiple of 64 bytes."""
    arrays = zoo.expected(name)
    layout = layout_of(zoo.TREES[name]())
    starts, size = places(arrays)
    assert layout.nbytes == size
    assert {leaf.path: leaf.offset for leaf in layout.leaves} == starts
    assert [leaf.path for leaf in layout.leaves] == list(starts)
    for leaf in layout.leaves:
        array = arrays[leaf.path]
        assert (leaf.dtype, leaf.shape) == (array.dtype.name, array.shape)
        assert (leaf.numel, leaf.nbytes) == (array.size, array.nbytes)
        assert leaf.stop == leaf.offset + array.nbytes


@pytest.mark.parametrize("name", zoo.TREES)
def test_segments_tile_the_buffer(name):
    """One segment per dtype, in order of the name, without a gap, each holding its leaves."""
    layout = layout_of(zoo.TREES[name]())
    dtypes = {array.dtype.name for array in zoo.expected(name).values()}
    assert [segment.dtype for segment in layout.segments] == sorted(dtypes)
    ends = [0, *(segment.stop for segment in layout.segments)]
    assert [segment.offset for segment in layout.segments] == ends[:-1]
    assert layout.nbytes == ends[-1]
    for segment in layout.segments:
        assert segment.nbytes == segment.stop - segment.offset
        assert segment.offset % 64 == segment.stop % 64 == 0
        assert segment.nbytes % dtype_of(segment.dtype).itemsize == 0
    by_dtype = {segment.dtype: segment for segment in layout.segments}
    for leaf in layout.leaves:
        segment = by_dtype[leaf.dtype]
        assert segment.offset <= leaf.offset <= leaf.stop <= segment.stop


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_layout_holds_every_node(name):
    """Each tensordict and tensorclass is there with its class, batch size and names."""
    source = zoo.TREES[name]()
    nodes = {node.path: node for node in layout_of(source).nodes}
    assert next(iter(nodes)) == ()
    assert set(nodes) == set(zoo.nodes(source))
    for path, node in zoo.nodes(source).items():
        assert nodes[path].cls is type(node)
        assert nodes[path].batch_size == tuple(node.batch_size)
        named = any(entry is not None for entry in node.names)
        assert nodes[path].names == (tuple(node.names) if named else None)


def test_non_tensor_entries_stand_in_their_node():
    """They are the constants of the node, sorted by key."""
    root, n = layout_of(zoo.non_tensors()).nodes
    assert [(key, constant.value) for key, constant in root.constants] == [
        ("d", {"k": [1, 2.5, None], "t": (1, "u")}),
        ("s", "text"),
    ]
    assert [(key, constant.value.tolist()) for key, constant in n.constants] == [
        ("array", [0, 1, 2])
    ]


sizes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
leaves = st.dictionaries(
    st.lists(st.text(max_size=2), min_size=1, max_size=3).map(tuple),
    st.tuples(st.sampled_from(zoo.BOTH), sizes),
    max_size=12,
)


@given(leaves, st.randoms())
def test_places_do_not_depend_on_the_order(found, random):
    """Leaves given in any order get the places of the independent arithmetic of the tests."""
    rows = [(path, dtype, shape) for path, (dtype, shape) in found.items()]
    root = NodeSpec((), TensorDict, ())
    layout = make_layout(rows, [root])
    random.shuffle(rows)
    assert make_layout(rows, [root]) == layout
    end = 0
    for leaf in layout.leaves:
        assert end <= leaf.offset < end + 64
        assert leaf.offset % 64 == 0
        end = leaf.stop
    order = [(leaf.dtype, leaf.path) for leaf in layout.leaves]
    assert order == sorted((dtype, path) for path, (dtype, _) in found.items())


def test_the_empty_layout_takes_no_bytes():
    """No leaf, no segment, no byte."""
    layout = layout_of(TensorDict({}, [3]))
    assert (layout.leaves, layout.segments, layout.nbytes) == ((), (), 0)
    assert layout.nodes == (NodeSpec((), TensorDict, (3,)),)


def test_a_segment_counts_its_padding():
    """Three floats take one block of 64 bytes, and so does nothing less."""
    layout = layout_of(TensorDict({"x": torch.zeros(3), "y": torch.zeros(0)}))
    assert layout.segments == (Segment("float32", 0, 64),)
    assert layout.leaves == (
        LeafSpec(("x",), "float32", (3,), 0),
        LeafSpec(("y",), "float32", (0,), 64),
    )


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_layout_is_a_value(name):
    """Layouts of equal trees are equal, hash alike and cannot be changed."""
    layout, other = layout_of(zoo.TREES[name]()), layout_of(zoo.TREES[name]())
    assert layout == other
    assert hash(layout) == hash(other)
    with pytest.raises(AttributeError):
        setattr(layout, "leaves", ())  # noqa: B010 - a checker would refuse the assignment
    assert pickle.loads(pickle.dumps(layout)) == layout


@pytest.mark.parametrize("name", JSON_TREES)
def test_json_gives_the_layout_back(name):
    """Through JSON the layout comes back equal: places, classes, names, values, fingerprint."""
    layout = layout_of(zoo.TREES[name]())
    found = Layout.from_json(layout.to_json())
    assert found == layout
    assert hash(found) == hash(layout)
    assert found.fingerprint == layout.fingerprint
    assert found.to_json() == layout.to_json()
    assert found.nbytes == layout.nbytes


def test_json_keeps_non_tensor_values():
    """Tuples, dicts and arrays among the values come back as such."""
    found = Layout.from_json(layout_of(zoo.non_tensors()).to_json())
    assert found == layout_of(zoo.non_tensors())
    (_, d), _ = found.nodes[0].constants
    assert d.value == {"k": [1, 2.5, None], "t": (1, "u")}


def test_json_is_plain_data_without_offsets():
    """The text is JSON of paths, dtypes, shapes and nodes; the places are arithmetic."""
    data = json.loads(layout_of(zoo.flat()).to_json())
    assert data["leaves"] == [[["b"], "float32", [4, 3]], [["a"], "int32", [4]]]
    assert data["nodes"] == [[[], "TensorDict", [4], None, {}, []]]


def test_a_value_without_a_json_form_is_named():
    """The error says which entry cannot be written."""
    td = TensorDict({"n": {"x": torch.zeros(2)}})
    td["n"].set_non_tensor("callback", len)
    with pytest.raises(
        LayoutError, match=r"\['n', 'callback'\]: got a non-tensor value of type builtin"
    ):
        layout_of(td).to_json()


def test_a_pickled_layout_is_found_in_a_dict_elsewhere(elsewhere):
    """Its hash is that of the process it is in, whatever the hash seed where it came from."""
    assert elsewhere["found"] == {name: name for name in zoo.TREES}
