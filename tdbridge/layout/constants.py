"""Non-tensor values as part of a structure: compared, hashed and written as JSON.

A pytree's static half must be hashable and comparable, and users put lists, dicts and arrays
there. All three needs are served by one canonical encoding to JSON.
"""

import base64
import copyreg
import hashlib
import json
import math
import pickle
from collections.abc import Callable, Iterator
from functools import cached_property
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

from tdbridge._compat.torch import why_not_dense
from tdbridge.errors import LayoutError, LeafTypeError
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.non_tensors import PerElement, per_element

_TAG = "!"


class Constant:
    """One non-tensor value, with the equality and the hash that a structure needs.

    Two constants are equal when type and content are: `1`, `1.0` and `True` differ, arrays are
    compared by dtype, shape and bytes, NaN equals NaN, and the order of a dict does not count.
    The value itself is kept, not copied; digest and JSON are those that it had when either was
    first asked for, whatever becomes of it later.

    Example:
        >>> Constant([1, 2]) == Constant([1, 2]), Constant(1) == Constant(True)
        (True, False)
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @cached_property
    def token(self) -> str:
        """A digest of the type and the content, equal in every process."""
        return hashlib.sha256(self._encoded[0].encode()).hexdigest()

    @cached_property
    def _encoded(self) -> tuple[str, list[str]]:
        """The value as JSON text, and the types of the parts that have a digest there only."""
        opaque: list[str] = []

        def digest(value: Any) -> Any:
            opaque.append(type(value).__qualname__)
            return _digest_of_opaque(value)

        return json.dumps(_encode(self.value, digest), sort_keys=True), opaque

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return NotImplemented
        return self.token == other.token

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
        text, opaque = self._encoded
        if opaque:
            raise LayoutError(
                f"got a non-tensor value of type {opaque[0]}, which has no JSON form. Use None, "
                "bool, int, float, complex, str, bytes, list, tuple, dict, set or an array."
            )
        return json.loads(text)

    @staticmethod
    def from_json(data: Any) -> "Constant":
        """The constant that `to_json` gave `data` for. Nothing in `data` is executed.

        Raises:
            LayoutError: `to_json` gives `data` for no constant.
        """
        try:
            constant = Constant(_decode(data))
        except Exception as error:  # whatever a decoder of malformed data may raise
            raise LayoutError(f"got {data!r}, which is no value: {error!r}") from error
        if json.dumps(constant.to_json(), sort_keys=True) != json.dumps(data, sort_keys=True):
            raise LayoutError(f"got {data!r}, which is no value that to_json writes.")
        return constant


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
    if type(value) is torch.Tensor and why_not_dense(value) is None:
        return _encode_tensor(value)
    # A subclass of ndarray may hold more than its numbers: a mask, units, field names.
    if type(value) is np.ndarray and _has_name(value.dtype):
        return _encode_array("array", value)
    if isinstance(value, np.generic) and _has_name(value.dtype):
        return _encode_array("scalar", np.asarray(value))
    return opaque(value)


def _sorted(items: list[Any]) -> list[Any]:
    return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))


def _encode_dict(value: dict[Any, Any], inner: Callable[[Any], Any]) -> dict[str, Any]:
    return {_TAG: "dict", "v": _sorted([[inner(k), inner(v)] for k, v in value.items()])}


def _encode_per_element(value: PerElement, inner: Callable[[Any], Any]) -> dict[str, Any]:
    return {_TAG: "each", "shape": list(value.shape), "v": [inner(v) for v in value.array.flat]}


def _encode_array(tag: str, value: np.ndarray) -> dict[str, Any]:
    # `tobytes` gives C order whatever the strides; the dtype is native after `newbyteorder`.
    native = value.astype(value.dtype.newbyteorder("="), copy=False)
    data = base64.b64encode(native.tobytes()).decode()
    return {_TAG: tag, "dtype": _dtype_name(native.dtype), "shape": list(value.shape), "v": data}


def _encode_tensor(value: torch.Tensor) -> dict[str, Any]:
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
    name = dtype_of(value.dtype).name
    return {_TAG: "tensor", "dtype": name, "shape": list(value.shape), "v": data}


_TEXT_AND_TIME = "USMm"


def _dtype_name(dtype: np.dtype) -> str:
    return dtype.str if dtype.kind in _TEXT_AND_TIME else dtype_of(dtype).name


def _has_name(dtype: np.dtype) -> bool:
    try:
        return bool(_dtype_name(dtype))
    except LeafTypeError:  # objects, records, long double
        return False


_ENCODERS: dict[type, Callable[[Any, Callable[[Any], Any]], Any]] = {
    dict: _encode_dict,
    PerElement: _encode_per_element,
    tuple: lambda v, inner: {_TAG: "tuple", "v": [inner(item) for item in v]},
    set: lambda v, inner: {_TAG: "set", "v": _sorted([inner(item) for item in v])},
    frozenset: lambda v, inner: {_TAG: "frozenset", "v": _sorted([inner(item) for item in v])},
    bytes: lambda v, _: {_TAG: "bytes", "v": base64.b64encode(v).decode()},
    complex: lambda v, _: {_TAG: "complex", "v": [repr(v.real), repr(v.imag)]},
    torch.dtype: lambda v, _: {_TAG: "torch.dtype", "v": dtype_of(v).name},
    torch.Size: lambda v, _: {_TAG: "torch.Size", "v": list(v)},
    torch.device: lambda v, _: {_TAG: "torch.device", "v": str(v)},
}


def _decode_array(data: dict[str, Any]) -> np.ndarray:
    text = data["dtype"]
    dtype = np.dtype(text) if text[1:2] in _TEXT_AND_TIME else dtype_of(text).in_numpy
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
    "each": lambda d: per_element(d["shape"], [_decode(item) for item in d["v"]]),
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


def _digest_of_opaque(value: Any) -> Any:
    """Any other object: its class and what a pickle of it holds, or its identity without one."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        text = json.dumps(_encode(_pickled_parts(value), _digest_of_opaque), sort_keys=True)
        state = hashlib.sha256(text.encode()).hexdigest()
    except Exception:  # noqa: BLE001 - pickle raises whatever the object's own code raises
        state = f"id:{id(value)}"
    return {_TAG: "opaque", "class": name, "v": state}


def _pickled_parts(value: Any) -> Any:
    """What pickle writes of an object.

    Not as the bytes of the pickle: those depend on the order of sets, and on which of the equal
    parts are one object.
    """
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return pickle.dumps(value, protocol=4)  # by its name
    reducer = copyreg.dispatch_table.get(type(value))
    parts = reducer(value) if reducer is not None else value.__reduce_ex__(4)
    if isinstance(parts, str):
        return parts
    return [list(part) if isinstance(part, Iterator) else part for part in parts]
