"""`Precision`: the dtypes of parameters, of the computation and of its output."""

from dataclasses import dataclass
from typing import Any

from tensordict import is_floating

from tdbridge.cast.cast import cast
from tdbridge.cast.policy import Keep, Where, policy_of

_NAMES = {
    "p": "param", "param": "param", "params": "param", "c": "compute", "compute": "compute",
    "o": "output", "output": "output",
}  # fmt: skip


@dataclass(frozen=True)
class Precision:
    """The dtypes of mixed precision: of the parameters, the computation and the output.

    One object serves torch and JAX: each method is `cast` with one of the dtypes, and takes what
    `cast` takes.

    Attributes:
        param: of the parameters, as the optimizer keeps them.
        compute: of what the model computes with: parameters and inputs.
        output: of what it gives, and of the loss.
        keep: what stays as it is when it is cast to `compute`; see `cast`. Norm layers and router
            weights are what one keeps.
        where: which leaves; see `cast`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> precision = Precision.parse("params=float32,compute=bfloat16,output=float32")
        >>> params = TensorDict(w=torch.ones(2, 2), step=torch.tensor(0))
        >>> low = precision.to_compute(params)
        >>> low["w"].dtype, precision.to_param(low)["w"].dtype, low["step"].dtype
        (torch.bfloat16, torch.float32, torch.int64)
    """

    param: Any = "float32"
    compute: Any = "bfloat16"
    output: Any = "float32"
    keep: Keep = None
    where: Where = is_floating

    def __post_init__(self) -> None:
        for dtype in (self.param, self.compute, self.output):
            policy_of(dtype, self.where, self.keep)  # raises

    @classmethod
    def parse(cls, text: str, *, keep: Keep = None, where: Where = is_floating) -> "Precision":
        """Reads `"params=float32,compute=bfloat16,output=float32"`, in any order.

        Args:
            text: `p`, `c` and `o` do for the names; what is not named has the default of the
                class.
            keep: as that of the class.
            where: as that of the class.

        Raises:
            ValueError: a name is unknown, comes twice or has no dtype.
            LeafTypeError: there is no such dtype.
        """
        found: dict[str, Any] = {}
        for part in text.split(","):
            name, _, dtype = (word.strip() for word in part.partition("="))
            if name not in _NAMES or not dtype or _NAMES[name] in found:
                raise ValueError(
                    f'got {part.strip()!r} in {text!r}: expected "params=...,compute=...,'
                    'output=...", each at most once.'
                )
            found[_NAMES[name]] = dtype
        return cls(**found, keep=keep, where=where)

    def to_param(self, tree: Any, *, out: Any = None) -> Any:
        """The tree in the dtype of the parameters, what `keep` names included."""
        return cast(tree, self.param, where=self.where, out=out)

    def to_compute(self, tree: Any, *, out: Any = None) -> Any:
        """The tree in the dtype of the computation; what `keep` names stays, or gets its own."""
        return cast(tree, self.compute, where=self.where, keep=self.keep, out=out)

    def to_output(self, tree: Any, *, out: Any = None) -> Any:
        """The tree in the dtype of the output, what `keep` names included."""
        return cast(tree, self.output, where=self.where, out=out)
