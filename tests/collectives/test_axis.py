"""The calls inside of `jax.shard_map`: values against numpy, and the number of operations."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tensordict import is_floating

import tdbridge
from tdbridge import ArrayDict, CollectiveError, collectives
from tests.multiprocess.trees import CARRIES, COMPLEX, FLOAT8, part, reduced

SIZE, SHAPE = 4, (3, 5)
NAMES = sorted({*CARRIES["max"], *COMPLEX, *FLOAT8})


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:SIZE]), ("i",))


def rows_of(names: list[str], packed: bool = False, size: int = SIZE) -> Any:
    """A tree with a row for each member, and the rows in numpy; 64 bits stay 64 bits."""
    rows = {name: np.stack([part(name, i, *SHAPE) for i in range(size)]) for name in names}
    with jax.enable_x64(True):
        tree = ArrayDict({name: jnp.asarray(row) for name, row in rows.items()}, [size])
    return tree, rows


def on_members(mesh: Mesh, call: Any, tree: Any, out: Any = None, **options: Any) -> Any:
    """`call` of each member's own row, jitted; a dimension of one is put in front again."""

    def run(row: Any) -> Any:
        new = call(row[0])
        return jax.tree.map(lambda x: x[None], new) if out is None else new

    spec = P(mesh.axis_names)
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=spec, out_specs=spec if out is None else out, **options
    )
    with jax.enable_x64(True):
        return jax.jit(mapped)(tree)


def assert_bits(got: Any, expected: np.ndarray) -> None:
    got = np.asarray(got)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("op", CARRIES)
@pytest.mark.parametrize("packed", [False, True])
def test_all_reduce_gives_what_numpy_gives(mesh: Mesh, op: str, packed: bool):
    """For every dtype; JAX knows that all members have the same (`out_specs=P()`)."""
    tree, rows = rows_of(CARRIES[op])

    def call(row: Any) -> Any:
        if packed:
            return collectives.all_reduce(row.pack(), op, "i").unpack()
        return collectives.all_reduce(row, op, "i")

    found = on_members(mesh, call, tree, out=P())
    assert isinstance(found, ArrayDict)
    assert found.batch_size == ()
    for name, row in rows.items():
        expected = reduced(op, list(row))
        if op == "mean" and name in COMPLEX:
            np.testing.assert_allclose(np.asarray(found[name]), expected, rtol=1e-6)
        else:
            assert_bits(found[name], expected)


@pytest.mark.parametrize("op", CARRIES)
def test_reduce_scatter_gives_each_member_its_own(mesh: Mesh, op: str):
    """Of trees in a list; numpy reduces what the members have for each."""
    tree, _ = rows_of(CARRIES[op], size=SIZE * SIZE)
    parts = tree.reshape(SIZE, SIZE)
    found = on_members(
        mesh, lambda row: collectives.reduce_scatter([row[i] for i in range(SIZE)], op, "i"), parts
    )
    for name in CARRIES[op]:
        for i in range(SIZE):
            every = [part(name, sender * SIZE + i, *SHAPE) for sender in range(SIZE)]
            expected = reduced(op, every)
            np.testing.assert_array_equal(np.asarray(found[name][i]), expected)
            assert np.asarray(found[name]).dtype == expected.dtype


def odd_bits() -> dict[str, np.ndarray]:
    """Bits that a sum of numbers would lose: -0.0, NaN with a payload, the smallest number."""
    words = np.array([[0x80000000, 0x7FC01234, 1, 0xFF800001]] * SIZE, np.uint32)
    words[0], words[2:] = 0x3F800000, 0x40000000
    return {"x": words.view(np.float32), "h": words.astype(np.uint16).view(np.float16)}


def test_broadcast_gives_the_bits_of_one(mesh: Mesh):
    """Of every dtype, to the last bit; equal on all members to JAX too."""
    tree, rows = rows_of(NAMES)
    found = on_members(mesh, lambda row: collectives.broadcast(row, 1, "i"), tree, out=P())
    for name, row in rows.items():
        assert_bits(found[name], row[1])
    odd = odd_bits()
    tree = ArrayDict({key: jnp.asarray(value) for key, value in odd.items()}, [SIZE])
    found = on_members(
        mesh, lambda row: collectives.broadcast(row, group_src=1, group="i"), tree, P()
    )
    for name, row in odd.items():
        assert_bits(found[name], row[1])


@pytest.mark.parametrize("packed", [False, True])
def test_all_gather_gives_the_trees_of_all(mesh: Mesh, packed: bool):
    """As one tree with a batch dimension more, and as a list."""
    tree, rows = rows_of(NAMES)

    def call(row: Any) -> Any:
        row = row.pack() if packed else row
        stack = collectives.all_gather(row, "i")
        trees = collectives.all_gather(row, "i", stacked=False)
        return (stack.unpack(), trees[2].unpack()) if packed else (stack, trees[2])

    stack, third = on_members(mesh, call, tree)
    assert stack.batch_size == (SIZE, SIZE)
    for name, row in rows.items():
        for i in range(SIZE):
            assert_bits(stack[name][i], row)
            assert_bits(third[name][i], row[2])


def test_all_to_all_gives_what_the_members_have_for_one(mesh: Mesh):
    tree, _ = rows_of(NAMES, size=SIZE * SIZE)
    parts = tree.reshape(SIZE, SIZE)
    found = on_members(mesh, lambda row: collectives.all_to_all(row, "i"), parts)
    for name in NAMES:
        for i in range(SIZE):
            expected = np.stack([part(name, sender * SIZE + i, *SHAPE) for sender in range(SIZE)])
            assert_bits(found[name][i], expected)


def test_options_of_a_reduction(mesh: Mesh):
    """A factor, leaves that are left out, and bfloat16 added up in float32."""
    fine = np.array([[1.0], [2**-8], [2**-8], [2**-8]], jnp.bfloat16)
    tree = ArrayDict(
        {"w": jnp.asarray(fine), "n": jnp.arange(SIZE, dtype=jnp.int32)[:, None]}, [SIZE]
    )

    def call(row: Any) -> Any:
        half = collectives.premul_sum(0.5)
        mean = collectives.all_reduce(row, "mean", "i", where=is_floating, accumulate="float32")
        return collectives.all_reduce({"w": row["w"]}, half, "i", accumulate="float32"), mean

    halves, mean = on_members(mesh, call, tree)
    exact = np.float32(1 + 3 * 2**-8)  # one rounding, at the end
    assert np.asarray(halves["w"]).tolist() == [[jnp.bfloat16(exact / 2)]] * SIZE
    assert np.asarray(mean["w"]).tolist() == [[jnp.bfloat16(exact / 4)]] * SIZE
    assert np.asarray(mean["n"]).tolist() == [[0], [1], [2], [3]]


def test_several_axes_and_one_of_two(mesh: Mesh):
    """Over both, a leaf that differs along one of them counts as often as there are members."""
    square = Mesh(mesh.devices.reshape(2, 2), ("a", "b"))

    def run(x: Any, y: Any) -> Any:
        both = collectives.all_reduce({"x": x, "y": y}, "sum", ("a", "b"))
        gathered = collectives.all_gather({"x": x, "y": y}, ("a", "b"))
        return both, collectives.all_reduce({"x": x}, "sum", "a"), gathered

    x, y = jnp.arange(4.0).reshape(2, 2), jnp.array([1.0, 10.0])
    mapped = jax.shard_map(
        run,
        mesh=square,
        in_specs=(P("a", "b"), P("a")),
        out_specs=(P(), P(None, "b"), P(("a", "b"))),
    )
    both, one, gathered = jax.jit(mapped)(x, y)
    assert both["x"].tolist() == [[6.0]]
    assert both["y"].tolist() == [22.0]
    assert one["x"].tolist() == [[2.0, 4.0]]
    assert gathered["y"].reshape(4, 4).tolist() == [[1.0, 1.0, 10.0, 10.0]] * 4


def test_the_sum_has_the_gradient_of_psum(mesh: Mesh):
    def loss(row: Any) -> Any:
        total = collectives.all_reduce(row, "sum", "i")
        return (total["x"] ** 2).sum()

    def run(row: Any) -> Any:
        return jax.grad(loss)(row)["x"]

    x = jnp.arange(8.0).reshape(SIZE, 2)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    found = jax.jit(mapped)(ArrayDict({"x": x}))
    assert found.tolist() == np.tile(2 * np.asarray(x).sum(0), (SIZE, 1)).tolist()


def test_vmap_with_a_name(mesh: Mesh):
    rows = ArrayDict({"x": jnp.arange(6.0).reshape(3, 2)}, [3])
    found = jax.vmap(lambda row: collectives.all_reduce(row, "max", "i"), axis_name="i")(rows)
    assert found["x"].tolist() == [[4.0, 5.0]] * 3
    assert found.batch_size == (3,)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "operation"),
    [("all_reduce", "all-reduce"), ("all_gather", "all-gather"), ("broadcast", "all-reduce")],
)
def test_many_leaves_are_a_few_operations(mesh: Mesh, name: str, operation: str, packed: bool):
    """One for each dtype; XLA joins 256 leaves at most into one sum."""
    kinds = [jnp.float32, jnp.int32]
    tree = ArrayDict({f"x{i:03}": jnp.ones((SIZE, 16), kinds[i % 2]) for i in range(300)}, [SIZE])

    def call(row: Any) -> Any:
        row = row.pack() if packed else row[0]
        if name == "broadcast":
            return collectives.broadcast(row, 0, "i")
        return getattr(collectives, name)(row, group="i")

    mapped = jax.shard_map(call, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    text = jax.jit(mapped).lower(tree).compile().as_text() or ""
    assert (
        1
        <= len(re.findall(rf" {operation}(?:-start)?\(", text))
        <= (len(kinds) if packed or name == "all_gather" else 2)
    )


class TestRefused:
    """One clear error, at tracing."""

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda row: collectives.reduce(row, 0, group="i"), "all_reduce gives the result"),
            (lambda row: collectives.gather(row, 0, "i"), "all_gather gives"),
            (lambda row: collectives.scatter(row, None, 0, "i"), "let each member take its own"),
            (lambda row: collectives.send(row, 0, "i"), "ppermute"),
            (lambda row: collectives.irecv(row, 0, "i"), "ppermute"),
            (lambda row: collectives.all_reduce(row, "sum", "i", True), "async_op=True"),
            (lambda row: collectives.all_gather(row, "i", pad=True), "pad before"),
            (lambda row: collectives.broadcast(None, 0, "i"), "a tree of zeros"),
            (lambda row: collectives.broadcast(row, 4, "i"), "members 0 to 3"),
            (lambda row: collectives.broadcast(row, group="i"), "pass either src"),
            (lambda row: collectives.all_reduce(row, "mean", "i"), "['n']: got int32"),
            (lambda row: collectives.all_reduce(row.pack(), "mean", "i"), "['int32']: got int32"),
            (lambda row: collectives.all_reduce(row, "sum", "k"), "no axis here"),
            (lambda row: collectives.reduce_scatter([row], "sum", "i"), "got 1 trees, expected 4"),
            (
                lambda row: collectives.all_to_all([row, row, row, {"x": row["x"]}], "i"),
                "tree 3 has another structure",
            ),
        ],
    )
    def test_what_has_no_place_in_one_program(self, mesh: Mesh, call: Any, words: str):
        tree = ArrayDict({"n": jnp.arange(SIZE), "x": jnp.ones((SIZE, 2))}, [SIZE])
        with pytest.raises(CollectiveError, match=re.escape(words)):
            on_members(mesh, call, tree)

    def test_tensors_and_keys(self, mesh: Mesh):
        x = jnp.arange(SIZE)
        with pytest.raises(tdbridge.LeafTypeError, match=r"\['t'\]: got a Tensor.*to_jax"):
            on_members(mesh, lambda _: collectives.all_reduce({"t": torch.ones(2)}, "sum", "i"), x)
        keys = {"k": jax.random.key(0)}
        with pytest.raises(tdbridge.LeafTypeError, match=r"\['k'\]: got a key<fry>.*key_data"):
            on_members(mesh, lambda _: collectives.all_gather(keys, "i"), x)
