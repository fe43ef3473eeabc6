"""The table of dtypes, against torch, numpy, ml_dtypes and JAX themselves."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from tdbridge.errors import LeafTypeError
from tdbridge.layout.dtypes import NARROWED, TABLE, dtype_of
from tests import zoo


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("name", zoo.BOTH)
def test_a_dtype_is_found_by_each_of_its_spellings(name):
    """The torch dtype, the numpy dtype, the JAX dtype and the name lead to the same row."""
    row = dtype_of(name)
    assert row.name == name
    assert row.torch is getattr(torch, name)
    assert row.numpy == numpy_dtype(name)
    assert dtype_of(getattr(torch, name)) is row
    assert dtype_of(numpy_dtype(name)) is row
    if hasattr(jnp, name):
        assert dtype_of(jnp.dtype(getattr(jnp, name))) is row


def test_torch_and_numpy_agree_on_the_bytes():
    """The item size is the one that both frameworks use, and the same bits mean the same value."""
    for name in zoo.BOTH:
        itemsize = dtype_of(name).itemsize
        assert itemsize == getattr(torch, name).itemsize == numpy_dtype(name).itemsize
        ones = torch.ones(3).to(getattr(torch, name))
        assert zoo.as_numpy(ones).astype(complex).tolist() == [1, 1, 1], name


def test_every_row_of_the_table_is_its_own():
    """No name, torch dtype or numpy dtype stands in two rows, and each row has at least one."""
    for column in ("name", "torch", "numpy"):
        values = [value for row in TABLE if (value := getattr(row, column)) is not None]
        assert len(values) == len(set(values))
    assert all(row.torch is not None or row.numpy is not None for row in TABLE)


def test_a_row_names_dtypes_that_exist():
    """The name is numpy's own, else torch's own, and the item size is theirs."""
    for row in TABLE:
        if row.numpy is not None:
            assert row.numpy.name == row.name
            assert row.numpy.itemsize == row.itemsize
        else:
            assert str(row.torch) == f"torch.{row.name}"
        if row.torch is not None:
            assert row.torch.itemsize == row.itemsize


@pytest.mark.parametrize("name", ["complex32", "float4_e2m1fn_x2"])
def test_what_only_torch_has_has_no_numpy_dtype(name):
    """A dtype that numpy lacks has None there."""
    assert dtype_of(getattr(torch, name)).numpy is None


@pytest.mark.parametrize("name", ["int4", "uint4", "float8_e3m4", "float8_e4m3b11fnuz"])
def test_what_only_jax_has_has_no_torch_dtype(name):
    """A dtype that torch cannot compute with has None there."""
    assert dtype_of(numpy_dtype(name)).torch is None


def test_platform_aliases_are_the_same_dtype():
    """`long long` and `long` of 64 bits are one dtype, as numpy says."""
    assert np.dtype("longlong") == np.dtype("int64")
    assert dtype_of(np.dtype("longlong")) is dtype_of("int64")


def test_a_foreign_byte_order_is_the_same_dtype():
    """A leaf is laid out in the order of the machine, whatever order numpy holds it in."""
    assert dtype_of(np.dtype("float32").newbyteorder()) is dtype_of("float32")


@pytest.mark.parametrize(("wide", "narrow"), NARROWED.items())
def test_narrowed_is_what_jax_does_without_x64(wide, narrow):
    """The 64-bit dtypes become what JAX makes of them while x64 is off."""
    with pytest.warns(UserWarning, match="not available"):
        assert jnp.zeros(1, dtype=wide).dtype == np.dtype(narrow)


def test_every_64_bit_dtype_is_in_narrowed():
    """Those are all dtypes that JAX changes while x64 is off."""
    kept = [name for name in zoo.BOTH if jnp.asarray(np.zeros(1, numpy_dtype(name))).dtype == name]
    assert set(zoo.BOTH) - set(kept) == set(NARROWED)


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(object),
        np.dtype("U3"),
        np.dtype("M8[s]"),
        np.dtype([("a", "f4")]),
        torch.qint8,
        torch.bits8,
        "nope",
        "Float32",
        float,
        None,
    ],
    ids=repr,
)
def test_anything_else_is_refused(dtype):
    """Objects, text, dates, records, quantized and unknown dtypes raise."""
    with pytest.raises(LeafTypeError, match=r"got dtype .*, which is none of bool, uint8"):
        dtype_of(dtype)
