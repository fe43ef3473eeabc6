"""One model, fed by a torch loader, trained in JAX, checkpointed for both.

The images are scikit-learn's digits: 1,797 scans of 8 x 8 pixels, inside the package. The functions
stand in the order in which things happen:

1. the images become a memory-mapped TensorDict, which a torchdata loader shuffles;
2. JAX trains on the loader's batches, sharing their memory; half way everything is saved, and a new
   process that has nothing but the directory arrives at the same bits;
3. torch's own checkpoint loader reads the JAX parameters into an nn.Module;
4. Orbax, in a process without tdbridge, reads the torch parameters.

`python examples/digits.py` runs it, `--help` shows the options.
"""

import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.distributed.checkpoint as dcp
import typer
from digits_report import Summary, failures, plot_losses, show
from rich.console import Console
from rich.progress import Progress
from tensordict import TensorDict
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import tdbridge
from tdbridge import ArrayDict
from tdbridge.loaders import Loader, Rows, collate

PIXELS, HIDDEN, CLASSES = 64, 256, 10
BATCH, TEST_ROWS, SEED = 64, 360, 0
OPTIMIZER = optax.adam(2e-3)

# torch warns of a single process and torchdata calls something deprecated, at each use of theirs.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")

# 1. The data: a memory-mapped TensorDict, and a loader that can stop and go on.


def write_digits(workdir: Path) -> None:
    """Write `train` and `test` as memory-mapped TensorDicts: float32 images, int64 labels."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(SEED))
    images = torch.from_numpy(pixels).float()[order] / 16  # 0..16 becomes 0..1
    labels = torch.from_numpy(targets).long()[order]
    data = TensorDict({"image": images, "label": labels}, batch_size=len(order))
    data[TEST_ROWS:].memmap(workdir / "train")
    data[:TEST_ROWS].memmap(workdir / "test")


def make_loader(workdir: Path, log: "Log") -> Loader:
    """Shuffle the training rows into batches of one size, and hand them to JAX."""
    rows = Rows(TensorDict.load_memmap(workdir / "train"))
    generator = torch.Generator().manual_seed(SEED)
    source = StatefulDataLoader(
        rows, BATCH, shuffle=True, generator=generator, drop_last=True, collate_fn=collate
    )
    # The images are shared; the int64 labels are checked to fit into int32, and narrowed.
    return Loader(source, to="jax", transform=log.see)


# 2. The training, in JAX.


class State(NamedTuple):
    """What training changes, apart from the loader's position."""

    params: ArrayDict
    opt_state: optax.OptState


class Log:
    """What was seen of each batch: its loss, and how it arrived in JAX."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.shared: list[bool] = []
        self.label_dtypes: set[str] = set()
        self._addresses: deque[int] = deque()  # of the batches on their way, in their order

    def see(self, batch: TensorDict) -> TensorDict:
        """Note where torch wrote the images of a batch, before it is JAX's."""
        self._addresses.append(batch["image"].data_ptr())
        return batch

    def note(self, batch: ArrayDict, loss: jax.Array) -> None:
        """Note how the batch arrived, and its loss."""
        self.shared.append(batch["image"].unsafe_buffer_pointer() == self._addresses.popleft())
        self.label_dtypes.add(str(batch["label"].dtype))
        self.losses.append(float(loss))


def init() -> State:
    """Make the parameters of a network with one hidden layer, and Adam's state."""
    rng = np.random.default_rng(SEED)

    def dense(inputs: int, outputs: int) -> dict[str, jax.Array]:
        kernel = rng.normal(0, np.sqrt(2 / inputs), (inputs, outputs))
        return {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.zeros(outputs)}

    params = ArrayDict({"hidden": dense(PIXELS, HIDDEN), "out": dense(HIDDEN, CLASSES)})
    return State(params, OPTIMIZER.init(params))


def forward(params: ArrayDict, images: jax.Array) -> jax.Array:
    """Return the logits, computed in the dtype of the arguments."""
    x = jax.nn.relu(images @ params["hidden", "kernel"] + params["hidden", "bias"])
    return x @ params["out", "kernel"] + params["out", "bias"]


def loss_fn(params: ArrayDict, batch: ArrayDict) -> jax.Array:
    """Run the network in bfloat16, from float32 parameters; take the loss in float32."""
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch["image"]))
    logits = forward(*low).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@jax.jit
def step(state: State, batch: ArrayDict) -> tuple[State, jax.Array]:
    """Take one step. Batch, parameters and gradients are ArrayDicts, and those are pytrees."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    return State(params, opt_state), loss


def train(state: State, loader: Loader, epochs: int, log: Log) -> Iterator[State]:
    """Train from where the loader stands, to the end of the last epoch; give each new state."""
    while loader.epoch < epochs:
        for batch in loader:
            state, loss = step(state, batch)
            log.note(batch, loss)
            yield state


# Saving half way, and going on in a new process.


def by_name(tree: Any) -> dict[str, Any]:
    """Name each leaf by its path, as in `opt_state-0-mu-hidden-kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="-"): leaf for path, leaf in leaves}


def bits(arrays: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Take arrays of either framework to what has to be equal: dtype, shape and bytes."""
    plain = {name: np.asarray(array) for name, array in arrays.items()}
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in plain.items()}


def save_state(workdir: Path, state: State, loader: Loader) -> None:
    """Save all that a new process needs: the loader's position too, behind the last batch used."""
    # A checkpoint is made of names and arrays. Optax's namedtuples are neither, their leaves are.
    tree = {"state": by_name(state), "loader": loader.state_dict()}
    tdbridge.checkpoint.save(workdir / "halfway", tree, format="orbax", overwrite=True)


def load_state(workdir: Path, loader: Loader) -> State:
    """Set the loader to where it was, and return the rest. Nothing in the files is executed."""
    tree = tdbridge.checkpoint.load(workdir / "halfway", to="jax")
    loader.load_state_dict(tree["loader"])
    leaves, fresh = tree["state"], init()  # one has the values, the other the structure
    return jax.tree.unflatten(jax.tree.structure(fresh), [leaves[name] for name in by_name(fresh)])


def resume(workdir: Path, epochs: int) -> None:
    """In the new process: train the rest, from the directory alone, and write the result."""
    log = Log()
    loader = make_loader(workdir, log)
    *_, state = train(load_state(workdir, loader), loader, epochs, log)
    np.savez(workdir / "resumed.npz", losses=np.array(log.losses), **by_name(state))


def run_python(*command: object) -> None:
    """Run a script in a process of its own; it has to succeed."""
    code = subprocess.run([sys.executable, *map(str, command)], check=False).returncode
    if code:
        raise SystemExit(f"Failed: {command[0]} ended with exit code {code}.")


def train_with_a_break(workdir: Path, epochs: int) -> tuple[ArrayDict, Log, bool]:
    """Train through; say too whether a new process, from half way on, reached the same bits."""
    state, log = init(), Log()
    loader = make_loader(workdir, log)
    total = epochs * len(loader)
    half = epochs // 2 * len(loader) + len(loader) // 2  # inside an epoch, the harder place
    with Progress(console=Console(stderr=True)) as progress:
        states = train(state, loader, epochs, log)
        for state in progress.track(states, total=total, description="training"):
            if len(log.losses) == half:
                save_state(workdir, state, loader)

    run_python(__file__, "--workdir", workdir, "--epochs", epochs, "--resume")
    with np.load(workdir / "resumed.npz") as resumed:
        through = {"losses": np.array(log.losses[half:]), **by_name(state)}
        return state.params, log, bits(dict(resumed)) == bits(through)


# 3. and 4. The same parameters in torch, and torch's in Orbax.


class Net(nn.Module):
    """The network of `forward`, as torch writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(PIXELS, HIDDEN)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(images)))


def jax_to_torch(workdir: Path, params: ArrayDict) -> Net:
    """Save the JAX parameters, and let torch's own code load them."""
    tdbridge.checkpoint.save(workdir / "from_jax", params, format="dcp", overwrite=True)
    net = Net()
    # torch loads in place: each saved name gets the tensor that it is to fill. A kernel in JAX is
    # (inputs, outputs), a weight in torch (outputs, inputs), so the kernel gets a transposed view.
    targets = {
        "hidden.kernel": net.hidden.weight.detach().T,
        "hidden.bias": net.hidden.bias.detach(),
        "out.kernel": net.out.weight.detach().T,
        "out.bias": net.out.bias.detach(),
    }
    dcp.load(targets, checkpoint_id=workdir / "from_jax")  # pyright: ignore[reportPrivateImportUsage]
    return net


def torch_to_orbax(workdir: Path, net: Net) -> bool:
    """Save torch's parameters; say whether Orbax, without tdbridge, restores their bits."""
    tree = TensorDict(net.state_dict()).unflatten_keys(".")
    tdbridge.checkpoint.save(workdir / "from_torch", tree, format="orbax", overwrite=True)
    script = Path(__file__).with_name("restore_with_orbax.py")
    run_python(script, workdir / "from_torch", workdir / "restored.npz")
    with np.load(workdir / "restored.npz") as restored:
        return bits(dict(restored)) == bits(net.state_dict())


# The program.


def demonstrate(workdir: Path, epochs: int, plot: Path | None) -> Summary:
    """Do all of the above in `workdir`, and measure what came out."""
    started = time.perf_counter()
    write_digits(workdir)
    params, log, resume_bit_equal = train_with_a_break(workdir, epochs)
    net = jax_to_torch(workdir, params)
    orbax_bit_equal = torch_to_orbax(workdir, net)

    test = TensorDict.load_memmap(workdir / "test")
    labels = test["label"].numpy()
    in_jax = np.asarray(forward(params, tdbridge.to_jax(test)["image"]))
    in_torch = net(test["image"]).detach().numpy()
    if plot:
        plot_losses(log.losses, plot)
    return Summary(
        batches=len(log.shared),
        shared_batches=sum(log.shared),
        label_dtype=", ".join(sorted(log.label_dtypes)),
        resume_bit_equal=resume_bit_equal,
        accuracy_jax=float((in_jax.argmax(1) == labels).mean()),
        accuracy_torch=float((in_torch.argmax(1) == labels).mean()),
        max_logit_difference=float(np.abs(in_jax - in_torch).max()),
        orbax_bit_equal=orbax_bit_equal,
        seconds=time.perf_counter() - started,
    )


def main(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 15,
    workdir: Annotated[Path | None, typer.Option(help="Keep the files here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the losses into this PNG.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the summary into this file.")] = None,
    resuming: Annotated[bool, typer.Option("--resume", hidden=True)] = False,
) -> None:
    """Train on digits in JAX from a torch loader; take the result to torch and to Orbax."""
    jax.config.update("jax_platforms", "cpu")  # memory is shared where the batches are
    torch.set_num_threads(1)  # gathering 64 rows is no work for threads: leave the cores to XLA
    if workdir and resuming:
        resume(workdir, epochs)
        return
    with tempfile.TemporaryDirectory(prefix="digits-") as temporary:
        directory = workdir or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        summary = demonstrate(directory, epochs, plot)
    show(summary, json)
    if failed := failures(summary):
        raise SystemExit(f"Failed: {'; '.join(failed)}.")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
