"""One loader for two frameworks: torch and JAX train on the same batches, in the same memory.

The images are scikit-learn's digits: 1,797 scans of 8 x 8 pixels, inside the package. Each
framework trains a linear classifier on them, in one loop. `python examples/shared_loader.py` takes
seconds, and fails if one of the two learned too little, or if a batch was copied.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import torch
from sklearn.datasets import load_digits
from tensordict import TensorDict
from torch import nn
from torch.utils.data import DataLoader

from tdbridge import ArrayDict
from tdbridge.loaders import Loader, Rows, collate

PIXELS, CLASSES, TEST_ROWS, BATCH, EPOCHS, RATE = 64, 10, 360, 64, 20, 0.5
ENOUGH = 0.9


def digits() -> TensorDict:
    """The images as float32 and the labels as int64, in an order that is always the same."""
    pixels, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(pixels).float()[order] / 16  # 0..16 becomes 0..1
    return TensorDict({"image": images, "label": torch.from_numpy(targets).long()[order]}, [1797])


class InTorch:
    """A linear classifier, trained by SGD."""

    def __init__(self) -> None:
        self.net = nn.Linear(PIXELS, CLASSES)
        self.optimizer = torch.optim.SGD(self.net.parameters(), RATE)

    def step(self, batch: TensorDict) -> None:
        """Train on a batch."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.net(batch["image"]), batch["label"]).backward()
        self.optimizer.step()

    def accuracy(self, batch: TensorDict) -> float:
        """The share of right answers."""
        return float((self.net(batch["image"]).argmax(1) == batch["label"]).float().mean())


class Params(NamedTuple):
    """Of the same classifier in JAX."""

    weight: jax.Array
    bias: jax.Array


@jax.jit
def step(params: Params, batch: ArrayDict) -> Params:
    """Train on a batch, by SGD."""

    def loss(params: Params) -> jax.Array:
        logits = batch["image"] @ params.weight + params.bias
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    return jax.tree.map(lambda p, g: p - RATE * g, params, jax.grad(loss)(params))


def accuracy(params: Params, batch: ArrayDict) -> float:
    """The share of right answers."""
    logits = batch["image"] @ params.weight + params.bias
    return float((logits.argmax(1) == batch["label"]).mean())


def main() -> None:
    """Train both, and say what came out."""
    jax.config.update("jax_platforms", "cpu")  # memory is shared where the batches are
    torch.manual_seed(0)
    data = digits()
    rows, shuffled = Rows(data[TEST_ROWS:]), torch.Generator().manual_seed(1)
    source = DataLoader(rows, BATCH, shuffle=True, generator=shuffled, collate_fn=collate)
    loader = Loader(source, to="both")

    in_torch, params = InTorch(), Params(jnp.zeros((PIXELS, CLASSES)), jnp.zeros(CLASSES))
    shared = []
    for _ in range(EPOCHS):
        for batch, arrays in loader:
            shared.append(batch["image"].data_ptr() == arrays["image"].unsafe_buffer_pointer())
            in_torch.step(batch)
            params = step(params, arrays)

    ((test, test_arrays),) = Loader([data[:TEST_ROWS]], to="both")
    found = {"torch": in_torch.accuracy(test), "JAX": accuracy(params, test_arrays)}
    for framework, share in found.items():
        print(f"test accuracy in {framework}: {share:.1%}")
    print(f"batches in the same memory: {sum(shared)}/{len(shared)}")
    if min(found.values()) < ENOUGH or not all(shared):
        raise SystemExit(f"Failed: each is to be {ENOUGH:.0%} at least, and no batch a copy.")


if __name__ == "__main__":
    main()
