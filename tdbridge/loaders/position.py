"""How far a loader has got, and that as plain data which any checkpoint can hold."""

import base64
import json
import zlib
from dataclasses import dataclass
from typing import Any

from tdbridge.errors import LayoutError, LoaderError
from tdbridge.layout.constants import Constant

_LARGEST = 2**28  # bytes of text that a state may unfold to


@dataclass(frozen=True)
class Position:
    """After which batch a loader stands.

    Attributes:
        epoch: how many epochs have ended or were left.
        batch: how many batches of the epoch after those were received.
        source: the state of the source there; None before anything was received.
    """

    epoch: int = 0
    batch: int = 0
    source: dict[str, Any] | None = None

    def after(self, source: dict[str, Any] | None) -> "Position":
        """One batch further."""
        return Position(self.epoch, self.batch + 1, source)

    def at_end(self, source: dict[str, Any] | None) -> "Position":
        """At the beginning of the next epoch."""
        return Position(self.epoch + 1, 0, source)

    def state_dict(self) -> dict[str, Any]:
        """Two numbers and one text, the same keys each time.

        Raises:
            LoaderError: the source has a state that is no plain data.
        """
        try:
            data = Constant(self.source).to_json()
        except LayoutError as error:
            raise LoaderError(f"the state of the source cannot be written: {error}") from None
        text = zlib.compress(json.dumps(data).encode())
        return {"epoch": self.epoch, "batch": self.batch, "source": base64.b64encode(text).decode()}

    @staticmethod
    def of(state: Any) -> "Position":
        """The position that `state_dict` gave `state` for. Nothing in it is executed.

        Raises:
            LoaderError: it gave it for none.
        """
        keys = {*state.keys()} if hasattr(state, "keys") else None  # a TensorDict is no Mapping
        if keys != {"epoch", "batch", "source"}:
            got = type(state).__name__ if keys is None else sorted(map(str, keys))
            raise LoaderError(f"expected a state that Loader.state_dict() gave, got {got}.")
        try:
            unfold = zlib.decompressobj()
            text = unfold.decompress(base64.b64decode(str(state["source"])), _LARGEST)
            source = Constant.from_json(json.loads(text)).value
            epoch, batch = int(state["epoch"]), int(state["batch"])
            if min(epoch, batch) < 0:
                raise ValueError(f"got epoch {epoch} and batch {batch}")
            return Position(epoch, batch, source)
        except (ValueError, TypeError, zlib.error, LayoutError) as error:
            raise LoaderError(f"the state is damaged: {error}") from error
