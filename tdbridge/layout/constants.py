"""Non-tensor values as part of a structure: compared, hashed and written as JSON.

A pytree's static half must be hashable and comparable, and users put lists, dicts and arrays
there. All three needs are served by one canonical encoding to JSON.
"""

import base64
import hashlib
import json
import math
import pickle
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tdbridge.errors import LayoutError
from tdbridge.layout.dtypes import dtype_of

_TAG = "!"


class Constant:
    """One non-tensor value, with the equality and the hash that a structure needs.

    Two constants are equal when type and content are: `1`, `1.0` and `True` differ, arrays are
    compared by dtype, shape and bytes, NaN equals NaN, and the order of a dict does not count.
    The value itself is kept, not copied: do not change it in place.

    Example:
        >>> Constant([1, 2]) == Constant([1, 2]), Constant(1) == Constant(True)
        (True, False)
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @cached_property
    def token(self) -> str:
        """A digest of the type and the content, equal in every process."""
        text = json.dumps(_encode(self.value, _digest_of_opaque), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return NotImplemented
        return self.value is other.value or self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    def __repr__(self) -> str:
        return f"Constant({self.value!r})"

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return Constant, (self.value,)

    def to_json(self) -> Any:
        """The value as JSON data.

        Raises:
            LayoutError: JSON data cannot express a value of this type.
        """
        return _encode(self.value, _refuse)

    @staticmethod
    def from_json(data: Any) -> "Constant":
        """The constant that `to_json` gave `data` for. Nothing in `data` is executed."""
        return Constant(_decode(data))


def _encode(value: Any, opaque: Callable[[Any], Any]) -> Any:
    def inner(item: Any) -> Any:
        return _encode(item, opaque)

    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "v": str(value)}
    if type(value) is list:
        return [inner(item) for item in value]
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, inner)
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OV":
        return _encode_array("array", value)
    if isinstance(value, np.generic) and value.dtype.kind not in "OV":
        return _encode_array("scalar", np.asarray(value))
    return opaque(value)


def _sorted(items: list[Any]) -> list[Any]:
    return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))


def _encode_dict(value: dict[Any, Any], inner: Callable[[Any], Any]) -> dict[str, Any]:
    return {_TAG: "dict", "v": _sorted([[inner(k), inner(v)] for k, v in value.items()])}


def _encode_array(tag: str, value: np.ndarray) -> dict[str, Any]:
    # `tobytes` gives C order whatever the strides; the dtype is native after `newbyteorder`.
    native = value.astype(value.dtype.newbyteorder("="), copy=False)
    data = base64.b64encode(native.tobytes()).decode()
    return {_TAG: tag, "dtype": _dtype_name(native.dtype), "shape": list(value.shape), "v": data}


def _encode_tensor(value: torch.Tensor, _: object) -> dict[str, Any]:
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
    name = dtype_of(value.dtype).name
    return {_TAG: "tensor", "dtype": name, "shape": list(value.shape), "v": data}


def _dtype_name(dtype: np.dtype) -> str:
    return dtype.str if dtype.kind in "USMm" else dtype.name


_ENCODERS: dict[type, Callable[[Any, Callable[[Any], Any]], Any]] = {
    dict: _encode_dict,
    tuple: lambda v, inner: {_TAG: "tuple", "v": [inner(item) for item in v]},
    set: lambda v, inner: {_TAG: "set", "v": _sorted([inner(item) for item in v])},
    frozenset: lambda v, inner: {_TAG: "frozenset", "v": _sorted([inner(item) for item in v])},
    bytes: lambda v, _: {_TAG: "bytes", "v": base64.b64encode(v).decode()},
    complex: lambda v, _: {_TAG: "complex", "v": [repr(v.real), repr(v.imag)]},
    torch.Tensor: _encode_tensor,
    torch.dtype: lambda v, _: {_TAG: "torch.dtype", "v": dtype_of(v).name},
    torch.Size: lambda v, _: {_TAG: "torch.Size", "v": list(v)},
    torch.device: lambda v, _: {_TAG: "torch.device", "v": str(v)},
}


def _decode_array(data: dict[str, Any]) -> np.ndarray:
    text = data["dtype"]
    dtype = np.dtype(text) if text[0] in "<>|=" else dtype_of(text).in_numpy
    flat = np.frombuffer(base64.b64decode(data["v"]), dtype)
    return flat.reshape(data["shape"]).copy()


def _decode_tensor(data: dict[str, Any]) -> torch.Tensor:
    raw = torch.frombuffer(
        bytearray(base64.b64decode(data["v"])) or bytearray(1), dtype=torch.uint8
    )
    dtype = dtype_of(data["dtype"]).in_torch
    count = math.prod(data["shape"]) * dtype.itemsize
    return raw[:count].view(dtype).reshape(data["shape"])


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda d: float(d["v"]),
    "dict": lambda d: {_decode(k): _decode(v) for k, v in d["v"]},
    "tuple": lambda d: tuple(_decode(item) for item in d["v"]),
    "set": lambda d: {_decode(item) for item in d["v"]},
    "frozenset": lambda d: frozenset(_decode(item) for item in d["v"]),
    "bytes": lambda d: base64.b64decode(d["v"]),
    "complex": lambda d: complex(float(d["v"][0]), float(d["v"][1])),
    "array": _decode_array,
    "scalar": lambda d: _decode_array(d)[()],
    "tensor": _decode_tensor,
    "torch.dtype": lambda d: dtype_of(d["v"]).torch,
    "torch.Size": lambda d: torch.Size(d["v"]),
    "torch.device": lambda d: torch.device(d["v"]),
}


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if isinstance(data, dict):
        return _DECODERS[data[_TAG]](data)
    return data


def _refuse(value: Any) -> Any:
    raise LayoutError(
        f"got a non-tensor value of type {type(value).__qualname__}, which has no JSON form. "
        "Use None, bool, int, float, complex, str, bytes, list, tuple, dict, set or an array."
    )


def _digest_of_opaque(value: Any) -> Any:
    """Any other object: its class and its pickle, or its identity where it has no pickle."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        state = hashlib.sha256(pickle.dumps(value, protocol=5)).hexdigest()
    except Exception:  # noqa: BLE001 - pickle raises whatever the object's own code raises
        state = f"id:{id(value)}"
    return {_TAG: "opaque", "class": name, "v": state}
