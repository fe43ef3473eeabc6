"""One torch process learns, two JAX processes evaluate with its weights, over gloo.

The images are scikit-learn's digits. Every few steps the learner broadcasts its weights, which
arrive in the actors as jax arrays, and each actor counts the right answers in its half of the test
images. At the end the actors send their logits, which have to be those of torch.
`torchrun --nproc-per-node 3 examples/torch_learner_jax_actors.py` runs it.
"""

import os

# One thread for each process: torchrun sees to torch's.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from tensordict import TensorDict
from torch import Tensor, nn

from tdbridge import ArrayDict, collectives

LEARNER, ACTORS, PIXELS, HIDDEN, CLASSES = 0, (1, 2), 64, 128, 10
BATCH, TEST_ROWS, STEPS, EVERY, ENOUGH = 64, 360, 400, 80, 0.9


class Net(nn.Module):
    """A network with one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(PIXELS, HIDDEN)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(images)))


@jax.jit
def forward(weights: ArrayDict, images: jax.Array) -> jax.Array:
    """The logits of the same network; a weight of torch is (outputs, inputs)."""
    x = jax.nn.relu(images @ weights["hidden", "weight"].T + weights["hidden", "bias"])
    return x @ weights["out", "weight"].T + weights["out", "bias"]


def learn(images: Tensor, labels: Tensor, test_images: Tensor) -> None:
    """Train in torch; the actors say how good it is."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    weights = TensorDict(net.state_dict()).unflatten_keys(".")  # the memory of the parameters
    accuracy = 0.0
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(images), (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
        optimizer.step()
        if step % EVERY == 0:
            collectives.broadcast(weights, src=LEARNER)
            right = TensorDict(right=torch.zeros((), dtype=torch.int32))  # of none of its own
            collectives.reduce(right, dst=LEARNER)
            accuracy = right["right"].item() / TEST_ROWS
            print(f"step {step}: {accuracy:.1%} of the test images are right", flush=True)
    halves = [collectives.recv(src=rank)["logits"] for rank in ACTORS]
    difference = (torch.cat(halves) - net(test_images)).abs().max().item()
    print(f"largest difference of the logits: {difference:.1e}")
    assert accuracy > ENOUGH
    assert difference < 1e-4


def act(images: jax.Array, labels: jax.Array) -> None:
    """Evaluate in JAX with the weights that come."""
    weights, logits = None, None
    for _ in range(STEPS // EVERY):
        # The first ones come with their layout, the later ones take the place of the last.
        weights = collectives.broadcast(weights, src=LEARNER, to="jax")
        logits = forward(weights, images)
        right = (logits.argmax(1) == labels).sum()
        collectives.reduce(ArrayDict({"right": right}), dst=LEARNER)
    collectives.send(ArrayDict({"logits": logits}), dst=LEARNER)


def main() -> None:
    """Be the learner or an actor, by the rank that torchrun gave."""
    jax.config.update("jax_platforms", "cpu")
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = images.float() / 16
    test, train = torch.randperm(len(images)).tensor_split([TEST_ROWS])  # on every rank the same
    if (rank := dist.get_rank()) == LEARNER:
        learn(images[train], labels[train], images[test])
    else:
        half = test.chunk(len(ACTORS))[ACTORS.index(rank)]
        act(jnp.asarray(images[half].numpy()), jnp.asarray(labels[half].int().numpy()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
