"""A NodeDef as bytes, so that `jax.export` can serialise functions of our trees."""

import contextlib
import json
from typing import Any

from jax import export

from tdbridge.errors import LayoutError
from tdbridge.layout.classes import class_from_name, class_name
from tdbridge.layout.constants import Constant
from tdbridge.pytrees.static import NodeDef


def register_export(cls: type, name: str) -> None:
    """Lets `jax.export.Exported.serialize` write trees with nodes of class `cls`, under `name`.

    A class that is defined again under its name, as in a notebook, leaves the first in its place.
    """
    with contextlib.suppress(ValueError):
        export.register_pytree_node_serialization(
            cls, serialized_name=name, serialize_auxdata=to_bytes, deserialize_auxdata=from_bytes
        )


def to_bytes(definition: NodeDef) -> bytes:
    """The definition as JSON text.

    Raises:
        LayoutError: a non-tensor entry has no JSON form.
    """
    data: dict[str, Any] = {
        "keys": definition.keys,
        "event_dims": definition.event_dims,
        "followers": definition.followers,
        "cls": class_name(definition.cls),
        "names": definition.names,
        "constants": [[key, constant.to_json()] for key, constant in definition.constants],
        "batch_size": definition.batch_size,
    }
    return json.dumps(data).encode()


def from_bytes(data: bytes | bytearray) -> NodeDef:
    """What `to_bytes` wrote. Nothing is executed or imported.

    Raises:
        LayoutError: the bytes are no definition, or name a class that is not defined here.
    """
    try:
        fields = json.loads(bytes(data))
        names, size = fields["names"], fields["batch_size"]
        return NodeDef(
            keys=tuple(fields["keys"]),
            event_dims=tuple(fields["event_dims"]),
            followers=tuple(fields["followers"]),
            cls=class_from_name(fields["cls"]),
            names=None if names is None else tuple(names),
            constants=tuple((k, Constant.from_json(v)) for k, v in fields["constants"]),
            batch_size=None if size is None else tuple(size),
        )
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, LayoutError):
            raise
        raise LayoutError(f"these bytes are no definition of a tree: {error!r}") from error
