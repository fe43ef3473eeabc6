"""Grain feeds torch, a torch DataLoader feeds JAX, and both go on exactly where they stopped.

A linear classifier of scikit-learn's digits is trained four times: in torch on batches of Grain, in
JAX on batches of a DataLoader with two workers, each without a break and with one. The run with the
break is saved inside of an epoch, and goes on from the files alone, with a new loader and a new
model. `python examples/grain_and_torch.py` fails if one loss differs in one bit.
"""

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import grain
import jax
import optax
import torch
from sklearn.datasets import load_digits
from tensordict import TensorDict
from torch.utils.data import DataLoader

import tdbridge
from tdbridge import ArrayDict
from tdbridge.loaders import GrainSource, Loader, Rows, collate

BATCH, EPOCHS, RATE = 128, 3, 0.5
STOP = 20  # of 45 steps: inside the second epoch

# JAX says so of every fork. Workers of a Loader cannot use JAX, so they do not hang in it.
warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)


def digits() -> TensorDict:
    """The images as float32 and the labels as int64."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    data = {"image": images.float() / 16, "label": labels.long()}
    return TensorDict(data, batch_size=len(labels))  # pyright: ignore[reportArgumentType]


def grain_for_torch() -> Loader:
    """Grain reads, shuffles and batches; torch gets TensorDicts."""
    rows = grain.MapDataset.source(GrainSource(digits()))
    return Loader(rows.shuffle(seed=1).batch(BATCH, batch_fn=collate))


def torch_for_jax() -> Loader:
    """Two worker processes of torch gather the rows; JAX gets the memory that they wrote to."""
    order = torch.Generator().manual_seed(1)
    source = DataLoader(
        Rows(digits()), BATCH, shuffle=True, num_workers=2, generator=order, collate_fn=collate
    )
    return Loader(source, to="jax")


def torch_step(params: TensorDict, batch: TensorDict) -> tuple[Any, torch.Tensor]:
    """One step of SGD in torch; the new parameters, and the loss."""

    def loss_of(params: TensorDict) -> torch.Tensor:
        logits = batch["image"] @ params["weight"] + params["bias"]
        return torch.nn.functional.cross_entropy(logits, batch["label"])

    grads, loss = torch.func.grad_and_value(loss_of)(params)
    return params - RATE * grads, loss


@jax.jit
def jax_step(params: ArrayDict, batch: ArrayDict) -> tuple[Any, jax.Array]:
    """The same in JAX."""

    def loss_of(params: ArrayDict) -> jax.Array:
        logits = batch["image"] @ params["weight"] + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def train(loader: Loader, step: Any, params: Any, most: int | None = None) -> Any:
    """Go on from where the loader stands, to the last epoch's end, or for so many steps."""
    losses = []
    while loader.epoch < EPOCHS:
        for batch in loader:
            params, loss = step(params, batch)
            losses.append(float(loss))
            if len(losses) == most:
                return params, losses
    return params, losses


def train_with_a_stop(make_loader: Callable[[], Loader], step: Any, params: Any, to: Any) -> Any:
    """The same, but saved after `STOP` steps, and continued from the files."""
    loader = make_loader()
    params, before = train(loader, step, params, STOP)
    with tempfile.TemporaryDirectory() as folder:
        saved = {"params": params, "loader": loader.state_dict()}
        tdbridge.checkpoint.save(folder + "/saved", saved, format="orbax")
        again = tdbridge.checkpoint.load(folder + "/saved", to=to)
    loader = make_loader()
    loader.load_state_dict(again["loader"])
    params, after = train(loader, step, again["params"])
    return params, before + after


def main() -> None:
    """Train with and without a break, and compare."""
    jax.config.update("jax_platforms", "cpu")
    start = TensorDict({"weight": torch.zeros(64, 10), "bias": torch.zeros(10)})
    for to, make_loader, step, params in (
        ("torch", grain_for_torch, torch_step, start),
        ("jax", torch_for_jax, jax_step, tdbridge.to_jax(start)),
    ):
        _, whole = train(make_loader(), step, params)
        _, broken = train_with_a_stop(make_loader, step, params, to)
        found = "the same" if broken == whole else "others"
        print(f"{make_loader.__name__}: {len(whole)} losses, after a break {found}")
        if broken != whole or whole[-1] > 0.9:
            raise SystemExit(f"Failed: the last losses are {whole[-1]} and {broken[-1]}.")


if __name__ == "__main__":
    main()
