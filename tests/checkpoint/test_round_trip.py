"""save, then load: the same bits, in the framework that was asked for."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    TensorClass,
    TensorDict,
)

import tdbridge.checkpoint as checkpoint
from tdbridge.checkpoint.api import Framework
from tdbridge.errors import CheckpointError, NarrowingError
from tdbridge.pytrees.arraydict import ArrayDict
from tests.checkpoint.trees import COMMON, FLOAT32_BITS, bits, numpy_dtype, same_bits, tensor

FORMATS = ["dcp", "orbax"]
ARRAYS = {name: bits(name) for name in COMMON}


@pytest.fixture(params=FORMATS)
def round_trip(request, tmp_path):
    """Gives a function that saves and loads."""

    def go(tree: Any, to: Framework = "torch") -> Any:
        checkpoint.save(tmp_path / "c", tree, format=request.param)
        assert checkpoint.detect(tmp_path / "c") == request.param
        return checkpoint.load(tmp_path / "c", to=to)

    return go


@pytest.mark.parametrize("to", ["torch", "numpy"])
@pytest.mark.parametrize("source", ["torch", "numpy"])
def test_every_dtype_keeps_its_bits(round_trip, source, to):
    """No dtype is cast, between any two frameworks."""
    leaves = ARRAYS if source == "numpy" else {n: tensor(a) for n, a in ARRAYS.items()}
    found = round_trip(leaves, to)
    assert set(found.keys()) == set(ARRAYS)
    assert [name for name in COMMON if not same_bits(found[name], ARRAYS[name])] == []


@pytest.mark.parametrize("to", ["torch", "numpy", "jax"])
def test_jax_arrays_keep_their_bits(round_trip, to):
    """A JAX array of any 8-, 16- or 32-bit dtype comes back as it was."""
    names = [n for n in COMMON if numpy_dtype(n).itemsize <= 4]
    found = round_trip({n: jnp.asarray(ARRAYS[n]) for n in names}, to)
    assert [name for name in names if not same_bits(found[name], ARRAYS[name])] == []


@pytest.mark.parametrize("to", ["torch", "numpy", "jax"])
def test_nan_payloads_and_negative_zero_survive(round_trip, to):
    """Floats are bits: no NaN is made quiet, no zero loses its sign."""
    expected = np.array(FLOAT32_BITS, np.uint32).view(np.float32)
    assert same_bits(round_trip({"x": tensor(expected)}, to)["x"], expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[1:, ::2],
        lambda t: t[1, 2],
        lambda t: t[:, :1].expand(4, 7),
        lambda t: t.flip(0),
        torch.nn.Parameter,
        MemoryMappedTensor.from_tensor,
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
    ],
)
def test_views_and_subclasses_are_saved_by_value(round_trip, view):
    """Strides, offsets, conjugation and tensor subclasses change nothing about the values."""
    source = view(torch.arange(20.0).reshape(4, 5))
    found = round_trip({"x": source})["x"]
    assert type(found) is torch.Tensor
    assert same_bits(found, source.detach().resolve_conj().resolve_neg().numpy().copy(order="C"))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6)[::-1],
        np.arange(6, dtype=">i4"),
        np.arange(6, dtype=">c8"),
        np.arange(12).reshape(3, 4).T,
        np.float32(1.5),
        np.bool_(True),
        np.broadcast_to(np.float16(2), (2, 3)),
    ],
)
def test_numpy_views_and_scalars_are_saved_by_value(round_trip, array):
    """Negative strides, foreign byte order and read-only memory change nothing about the values."""
    expected = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    assert same_bits(round_trip({"x": array}, "numpy")["x"], expected)


def test_a_sharded_jax_array_is_saved_whole(round_trip, devices):
    """An array spread over the devices of this process is gathered."""
    from jax.sharding import NamedSharding, PartitionSpec

    expected = np.arange(16, dtype=np.float32).reshape(8, 2)
    sharded = devices.put(expected, NamedSharding(devices.mesh, PartitionSpec("x")))
    assert same_bits(round_trip({"x": sharded})["x"], expected)


def test_empty_and_zero_dimensional_tensors(tmp_path):
    """DCP holds every shape."""
    arrays = {"e": np.zeros((0, 3), np.float16), "s": np.array(5, np.uint64)}
    checkpoint.save(tmp_path / "c", {n: tensor(a) for n, a in arrays.items()})
    found = checkpoint.load(tmp_path / "c", to="numpy")
    assert same_bits(found["e"], arrays["e"])
    assert same_bits(found["s"], arrays["s"])


def test_scalars_keep_their_types(round_trip):
    """Python values come back equal and of the same type."""
    scalars = {"b": True, "i": -(2**63), "f": 0.1, "t": "a/b.c\n", "n": None}
    tree = {"x": torch.ones(1), "l": [scalars]}
    found = round_trip(tree)["l"][0]
    assert found == scalars
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in scalars.items()}


def test_plain_containers_keep_their_structure(round_trip):
    """Lists, tuples and empty containers come back as they were."""
    tree = {
        "l": [np.ones(1), (np.zeros(2), 1), [], {}],
        "t": (1, (), ("a", None)),
        "e": {},
        "d": {"deep": {"e": []}},
    }
    found = round_trip(tree, "numpy")
    assert found["t"] == tree["t"]
    assert found["e"] == {}
    assert found["d"] == tree["d"]
    first, pair, *rest = found["l"]
    assert same_bits(first, np.ones(1))
    assert isinstance(pair, tuple)
    assert same_bits(pair[0], np.zeros(2))
    assert (pair[1], rest) == (1, [[], {}])


@pytest.mark.parametrize("key", ["", "..", "a/b", "/a", "a.", ".b", "é", "a\nb", "c", "zarr.json"])
def test_any_string_is_a_key(round_trip, tmp_path, key):
    """No key reaches the file system."""
    found = round_trip({key: np.arange(3), "other": {key: 1}}, "numpy")
    assert same_bits(found[key], np.arange(3))
    assert found["other"] == {key: 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_tensordict_keeps_batch_sizes_and_names(round_trip):
    """The sidecar restores the batch size and the names of every node, and non-tensor entries."""
    td = TensorDict(
        {
            "a": torch.zeros(4, 3),
            "sub": TensorDict({"b": torch.ones(4, 2, 5)}, [4, 2], names=["time", "agent"]),
            "empty": {},
            "note": NonTensorData("hello", batch_size=[4]),
            "count": NonTensorData(3, batch_size=[4]),
        },
        [4],
        names=["time"],
    )
    found = round_trip(td)
    assert type(found) is TensorDict
    assert (found.batch_size, found.names) == (torch.Size([4]), ["time"])
    assert (found["sub"].batch_size, found["sub"].names) == (torch.Size([4, 2]), ["time", "agent"])
    assert found["empty"].batch_size == torch.Size([4])
    assert (found["note"], found["count"]) == ("hello", 3)
    assert torch.equal(found["sub", "b"], torch.ones(4, 2, 5))


def test_a_tensordict_among_lists_stays_one(round_trip):
    """Where the tree holds lists, what was a TensorDict is one, and a dict is a dict."""
    tree = {"td": TensorDict({"x": torch.ones(2)}, [2]), "l": [torch.ones(1)], "d": {"y": 1}}
    found = round_trip(tree)
    assert type(found) is dict
    assert found["td"].batch_size == torch.Size([2])
    assert found["d"] == {"y": 1}


class Sample(TensorClass):
    """A tensorclass with a nested one and a string."""

    x: torch.Tensor
    label: str
    inner: "Sample | None" = None


def test_a_tensorclass_comes_back_as_its_tensordict(round_trip):
    """Fields, strings and batch sizes are kept; the class is not imported."""
    inner = Sample(x=torch.zeros(3), label="b", batch_size=[3])
    found = round_trip(Sample(x=torch.ones(3, 2), label="a", inner=inner, batch_size=[3]))
    assert type(found) is TensorDict
    assert (found["label"], found["inner", "label"]) == ("a", "b")
    assert found.batch_size == found["inner"].batch_size == torch.Size([3])


def test_an_equal_lazy_stack_is_saved_densely(round_trip):
    """A lazy stack of equal parts is the stacked tensordict."""
    parts = [TensorDict({"x": torch.full((2,), float(i))}, [2]) for i in range(3)]
    found = round_trip(LazyStackedTensorDict(*parts, stack_dim=0))
    assert found.batch_size == torch.Size([3, 2])
    assert found["x"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_an_array_dict_comes_back_in_both_frameworks(round_trip, tmp_path):
    """An ArrayDict is an ArrayDict to JAX and a TensorDict to torch, with batch size and names."""
    ad = ArrayDict(
        {"a": jnp.zeros((4, 3), jnp.bfloat16), "next": {"reward": jnp.ones(4)}, "note": "x"},
        [4],
        names=["time"],
    )
    found = round_trip(ad, "jax")
    assert isinstance(found, ArrayDict)
    assert (tuple(found.batch_size), list(found.names)) == ((4,), ["time"])
    assert found["a"].dtype == jnp.bfloat16
    assert found["next", "reward"].tolist() == [1, 1, 1, 1]
    assert found["note"] == "x"
    td = checkpoint.load(tmp_path / "c")
    assert (td.batch_size, td.names) == (torch.Size([4]), ["time"])
    assert td["a"].dtype == torch.bfloat16


def test_a_plain_tree_comes_back_in_jax(round_trip):
    """Lists hold JAX arrays, and what is no array stays as it is."""
    found = round_trip(
        {"l": [torch.arange(3.0), (1, "x")], "td": TensorDict({"y": torch.ones(2)})}, "jax"
    )
    assert isinstance(found["l"][0], jnp.ndarray)
    assert found["l"][0].tolist() == [0, 1, 2]
    assert found["l"][1] == (1, "x")
    assert isinstance(found["td"], ArrayDict)


def test_jax_narrows_integers_exactly_or_not_at_all(round_trip, tmp_path):
    """Without x64 an int64 that fits is int32, and one that does not is an error."""
    found = round_trip({"step": np.array([1, 2**31 - 1])}, "jax")
    assert found["step"].dtype == jnp.int32
    assert found["step"].tolist() == [1, 2**31 - 1]
    checkpoint.save(tmp_path / "big", {"step": np.array([2**31])})
    with pytest.raises(NarrowingError, match="step"):
        checkpoint.load(tmp_path / "big", to="jax")


def test_jax_gets_no_rounded_doubles(round_trip):
    """Without x64 a float64 leaf is an error, never float32."""
    with pytest.raises(NarrowingError, match="rate"):
        round_trip({"rate": np.array([0.1])}, "jax")


def test_a_dtype_that_torch_lacks_stays_in_numpy(tmp_path):
    """int4 goes through Orbax to numpy; torch and DCP say that they have none."""
    expected = np.arange(-3, 3).astype(numpy_dtype("int4"))
    checkpoint.save(tmp_path / "c", {"q": expected}, format="orbax")
    assert same_bits(checkpoint.load(tmp_path / "c", to="numpy")["q"], expected)
    with pytest.raises(CheckpointError, match=r"\['q'\]: got dtype int4, which torch has not"):
        checkpoint.load(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"\['q'\]: got dtype int4, which torch has not"):
        checkpoint.save(tmp_path / "d", {"q": expected})


def test_the_loaded_tree_is_independent_of_the_files(tmp_path):
    """What was loaded stays when the directory is replaced."""
    checkpoint.save(tmp_path / "c", {"x": torch.ones(1000)})
    found = checkpoint.load(tmp_path / "c")
    checkpoint.save(tmp_path / "c", {"x": torch.zeros(1000)}, overwrite=True)
    assert found["x"].sum() == 1000
