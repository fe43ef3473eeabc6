"""Layout.from_json on texts that `to_json` never wrote: an error, and no effect."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdbridge import Layout, layout_of
from tdbridge.errors import LayoutError
from tests import zoo


def sound() -> dict[str, Any]:
    """The data of a layout of two leaves, one of them nested."""
    td = zoo.flat()
    td["n"] = {"x": zoo.pattern("int8", 4, 2)}
    return json.loads(layout_of(td).to_json())


def changed(place: tuple[Any, ...], value: Any) -> str:
    data = sound()
    holder: Any = data
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    assert data != sound()
    return json.dumps(data)


def test_the_sound_data_is_a_layout():
    """What the other tests damage can be read."""
    layout = Layout.from_json(json.dumps(sound()))
    assert [leaf.path for leaf in layout.leaves] == [("b",), ("a",), ("n", "x")]
    assert [node.path for node in layout.nodes] == [(), ("n",)]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "null", "5", '"x"', "NaN", "[" * 100_000, '{"leaves": [], "nodes": []}',
     '{"version": 1, "leaves": [' + "9" * 5000 + '], "nodes": []}'],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_text_that_is_no_layout_is_refused(text):
    """Anything but the JSON of a layout raises, however deep or long."""
    with pytest.raises(LayoutError, match="no layout"):
        Layout.from_json(text)


SHAPES = [
    [-1], [4, -3], [1.5], ["4"], "4", [None], [[4]], {}, {"4": 0}, 4, None, [4, 2**63], [2**70],
    [4, 1e300], [4, 10**400], [2**32, 2**32], [5, 3],
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape)[:20])
def test_a_shape_is_a_list_of_sizes_that_fits(shape):
    """Negative, fractional, textual and huge sizes, and ones that break the batch size, raise."""
    with pytest.raises(LayoutError):
        Layout.from_json(changed(("leaves", 0, 2), shape))


@pytest.mark.parametrize(
    "path", ["b", [], [1], [None], [["b"]], {"b": 1}, None, ["m", "b"], ["a", "b"]]
)
def test_a_path_is_a_list_of_keys_in_the_tree(path):
    """Keys are strings, and each prefix of a leaf's path is a node."""
    with pytest.raises(LayoutError):
        Layout.from_json(changed(("leaves", 0, 0), path))


@pytest.mark.parametrize(
    "dtype", ["nope", "", 5, None, ["float32"], "object", "float32\0", "M8[s]"]
)
def test_a_dtype_is_a_name_of_the_table(dtype):
    """Other dtypes raise."""
    with pytest.raises(LayoutError):
        Layout.from_json(changed(("leaves", 0, 1), dtype))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_no_leaf_stands_twice(index):
    """Two leaves of one path would overwrite each other."""
    data = sound()
    data["leaves"].append(data["leaves"][index])
    with pytest.raises(LayoutError):
        Layout.from_json(json.dumps(data))


def damaged_nodes() -> dict[str, list[Any]]:
    root, n = sound()["nodes"]
    return {
        "none at all": [],
        "no root": [n],
        "no parent of a leaf": [root],
        "the root twice": [root, root, n],
        "another n": [root, n, n],
        "one that is a leaf": [root, n, [["a"], "TensorDict", [4], None, {}, []]],
        "an orphan": [root, n, [["p", "q"], "TensorDict", [4], None, {}, []]],
        "too short": [root, n[:5]],
        "too long": [root, [*n, 1]],
        "a path of text": [root, ["n", *n[1:]]],
        "a constant that is a leaf": [[*root[:4], {"a": 1}, []], n],
        "a constant that is a node": [[*root[:4], {"n": 1}, []], n],
    }


@pytest.mark.parametrize("case", damaged_nodes())
def test_the_nodes_form_one_tree(case):
    """There is one root, each node once, each with a parent, and none is a leaf as well."""
    data = {**sound(), "nodes": damaged_nodes()[case]}
    with pytest.raises(LayoutError):
        Layout.from_json(json.dumps(data))


@pytest.mark.parametrize("size", [[-4], [5], [4, 3, 3], "4", [4.5], ["4"], [2**70], None, 4])
def test_a_batch_size_is_the_start_of_every_shape(size):
    """Batch sizes that are no sizes, or that a leaf does not start with, raise."""
    with pytest.raises(LayoutError):
        Layout.from_json(changed(("nodes", 0, 2), size))


@pytest.mark.parametrize("names", ["a", [], ["a", "b"], [1], [["a"]], 5, {"a": 1}])
def test_names_go_with_the_batch_size(names):
    """There is one name, a text or null, per batch dimension."""
    with pytest.raises(LayoutError):
        Layout.from_json(changed(("nodes", 0, 3), names))


VALUES: list[Any] = [
    {},
    {"!": "nope"},
    {"!": "opaque", "class": "os.system", "v": "x"},
    {"!": "bytes", "v": "@@@"},
    {"!": "bytes", "v": "A"},
    {"!": "set", "v": [[1]]},
    {"!": "set", "v": [1, 1]},
    {"!": "dict", "v": [[1, 2], [1, 3]]},
    {"!": "dict", "v": [[[1], 2]]},
    {"!": "torch.device", "v": "nope"},
    {"!": "torch.dtype", "v": "nope"},
    {"!": "torch.Size", "v": ["x"]},
    {"!": "complex", "v": ["1.0"]},
    {"!": "float", "v": "1e5"},
    {"!": "array", "dtype": "float32", "shape": [-1], "v": "AAAAAA=="},
    {"!": "array", "dtype": "float32", "shape": [2], "v": "AAAAAA=="},
    {"!": "array", "dtype": "|O", "shape": [1], "v": "AAAAAAAAAAA="},
    {"!": "array", "dtype": "float32", "shape": [2**62, 2**62], "v": ""},
    {"!": "tensor", "dtype": "float32", "shape": [2**62], "v": "AAAAAA=="},
    {"!": "tensor", "dtype": "float32", "shape": [1], "v": "AAAAAAAAAAA="},
    {"!": "tensor", "dtype": "int4", "shape": [1], "v": "AAAAAA=="},
    {"!": "tensor", "dtype": "float32", "shape": [-1], "v": "AAAAAA=="},
    {"!": "each", "shape": [2], "v": ["a"]},
    {"!": "each", "shape": [2**40], "v": ["a"]},
    {"!": "each", "shape": [-1, -1], "v": ["a"]},
    {"!": "each", "shape": "2", "v": ["a", "b"]},
    {"!": "each", "shape": [1.0], "v": ["a"]},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: json.dumps(value)[:50])
def test_a_value_is_one_that_was_written(value):
    """Unknown tags, bytes that do not fill an array and doubled keys raise."""
    with pytest.raises(LayoutError):
        Layout.from_json(changed(("nodes", 0, 4), {"k": value}))


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.5])
def test_another_version_is_refused(version):
    """A text of a later version is not read as if it were of this one."""
    with pytest.raises(LayoutError, match="version"):
        Layout.from_json(changed(("version",), version))


CLASSES = [
    "os:system", "builtins:object", "torch.nn:Module", "no_such_module:X", "", ":", "TensorDict:",
    5, None, ["TensorDict"], "tensordict:NonTensorData", "tensordict:LazyStackedTensorDict",
    "tests.zoo:Step.__init__", "tests.zoo:Step.after", "tests.zoo:torch.nn.Module",
]  # fmt: skip


@pytest.mark.parametrize("name", CLASSES, ids=str)
def test_a_class_is_one_that_a_node_can_have(name):
    """Only TensorDict, its subclasses and tensorclasses that are defined here can be named."""
    with pytest.raises(LayoutError):
        Layout.from_json(changed(("nodes", 0, 1), name))


def test_the_error_says_what_to_import():
    """A class that is not defined here is named, with the remedy."""
    text = changed(("nodes", 0, 1), "my.agents:Step")
    with pytest.raises(LayoutError, match=r"got class 'my\.agents:Step', .* Import the module"):
        Layout.from_json(text)


def test_nothing_is_imported(elsewhere):
    """Not the module of a class, and no module that another one loads when it is asked for it."""
    assert elsewhere["imported"] == []


json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
spots = st.sampled_from(
    [("version",), ("leaves",), ("nodes",), ("leaves", 0), ("nodes", 1)]
    + [("leaves", i, j) for i in range(3) for j in range(3)]
    + [("nodes", i, j) for i in range(2) for j in range(5)]
)


@given(spots, json_data)
def test_any_change_is_read_exactly_or_refused(spot, value):
    """Whatever stands in whatever place, the text is a layout that writes it again, or an error."""
    data = copy.deepcopy(sound())
    holder: Any = data
    for key in spot[:-1]:
        holder = holder[key]
    holder[spot[-1]] = value
    text = json.dumps(data, sort_keys=True)
    try:
        layout = Layout.from_json(text)
    except LayoutError:
        return
    assert layout.to_json() == text
