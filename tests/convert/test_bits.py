"""Every bit of every dtype survives, and bits that memory does not hold are resolved."""

import math
from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch

from tdbridge import to_jax, to_torch
from tests import zoo
from tests.convert.trees import extremes, tensor_of

COPY = pytest.mark.parametrize("copy", [None, True])


def negative(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory with the negative bit set."""
    return torch._neg_view(tensor)  # pyright: ignore[reportPrivateImportUsage]


def laid_out(values: np.ndarray, how: str) -> torch.Tensor:
    """The values in a tensor that crosses shared, permuted, unaligned or with gaps."""
    tensor = tensor_of(values)
    if how == "shared":
        return tensor
    if how == "permuted":
        return tensor_of(np.ascontiguousarray(values.reshape(2, -1).T)).t()
    if how == "unaligned":
        return tensor_of(np.concatenate([values[:1], values]))[1:]
    return tensor_of(np.repeat(values, 2))[::2]


@COPY
@pytest.mark.parametrize("how", ["shared", "permuted", "unaligned", "gaps"])
@pytest.mark.parametrize("name", zoo.BOTH)
def test_every_bit_of_every_dtype_survives(name: str, how: str, copy: bool | None):
    """NaN payloads, signalling NaN, -0.0, subnormals and the extreme integers keep their bits."""
    values = extremes(name)
    tensor = laid_out(values, how)
    expected = values.tobytes()
    with jax.enable_x64(True):
        array = to_jax({"x": tensor}, copy=copy)["x"]
    assert array.dtype == zoo.numpy_dtype(name)
    assert np.asarray(array).tobytes() == expected
    back = to_torch({"x": array}, copy=copy)["x"]
    assert back.dtype == tensor.dtype
    assert zoo.as_numpy(back).tobytes() == expected


@pytest.mark.parametrize("name", zoo.BOTH)
def test_every_bit_of_a_sharded_array_survives(name: str):
    """An array over eight devices is put together bit by bit."""
    values = np.resize(extremes(name), (8, 6))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.enable_x64(True):
        array = jax.device_put(values, jax.NamedSharding(mesh, jax.P("x")))
    assert zoo.same_bits(zoo.as_numpy(to_torch(array)), values)


def test_conjugate_and_negative_bits_are_resolved():
    """A tensor whose memory holds other values than it shows crosses as the values it shows."""
    z = torch.tensor([1 + 2j, -3 - 0j, complex(math.inf, -math.inf)])
    tree = {
        "conj": z.conj(),
        "neg": z.conj().imag,
        "both": z.conj().imag[1:],
        "real": z.conj().real,
    }
    got = to_jax(tree)
    assert np.asarray(got["conj"]).tolist() == [1 - 2j, -3 + 0j, complex(math.inf, math.inf)]
    assert np.asarray(got["neg"]).tolist() == [-2, 0, math.inf]
    assert np.asarray(got["both"]).tolist() == [0, math.inf]
    assert np.asarray(got["real"]).tolist() == [1, -3, math.inf]


LAZY_BITS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[complex]]] = {
    "conj": (lambda z: z.conj(), [1 - 2j, -3 + 4j]),
    "neg": (negative, [-1 - 2j, 3 + 4j]),
    "both": (lambda z: negative(z.conj()), [-1 + 2j, 3 - 4j]),
    "neg_of_real": (lambda z: negative(z.real.contiguous()), [-1, 3]),
}


@COPY
@pytest.mark.parametrize("kind", LAZY_BITS)
def test_a_bit_alone_is_enough_to_copy(kind: str, copy: bool | None):
    """A row-major, aligned tensor with a conjugate or negative bit is not taken at face value."""
    view, expected = LAZY_BITS[kind]
    tensor = view(torch.tensor([1 + 2j, -3 - 4j]))
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    assert np.asarray(to_jax(tensor, copy=copy)).tolist() == expected
    assert np.asarray(to_jax([tensor, torch.ones(5)[1:]], copy=copy)[0]).tolist() == expected
    with pytest.raises(ValueError, match="bit has to be resolved"):
        to_jax(tensor, copy=False)
