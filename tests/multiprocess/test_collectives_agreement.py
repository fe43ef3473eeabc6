"""Ranks with other trees: all raise, nothing is written, nobody hangs; and what is sent for it."""

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from tdbridge import collectives
from tdbridge.collectives.agreement import Check
from tests.multiprocess.pool import Pool
from tests.multiprocess.trees import text_of

pytestmark = pytest.mark.xdist_group("multiprocess")


def tree(**more: torch.Tensor) -> TensorDict:
    return TensorDict({"x": torch.ones(3), "k": torch.ones(2, dtype=torch.int32), **more}, [])


OTHER = {
    "shape": lambda: tree(x=torch.ones(4)),
    "dtype": lambda: tree(x=torch.ones(3, dtype=torch.float64)),
    "more": lambda: tree(z=torch.ones(1)),
    "less": lambda: tree().exclude("k"),
    "sparse": lambda: tree(x=torch.eye(3).to_sparse()),
}
SAYS = {
    "shape": "float32 [4] on rank 1",
    "dtype": "float64 [3] on rank 1",
    "more": "['z']:",
    "less": "['k']:",
    "sparse": "sparse",
}


def differing(kind: str, check: Check) -> Any:
    group = dist.new_group(list(range(dist.get_world_size())))
    own = OTHER[kind]() if dist.get_rank() == 1 else tree()
    before = own.clone()
    text = text_of(collectives.all_reduce, own, "sum", group, check=check)
    same = kind == "sparse" or bool((own == before).all())
    again = collectives.all_reduce(tree(), "sum", group, check=check)["x"].tolist()
    return text, same, again


@pytest.mark.parametrize("check", ["first", "always"])
@pytest.mark.parametrize("kind", OTHER)
def test_every_rank_raises_where_one_has_another_tree(three: Pool, kind: str, check: Check):
    """It says which leaf is what on which rank; the tree is as it was, and the group works on."""
    for text, same, again in three.run(differing, kind, check):
        assert SAYS[kind] in text
        assert same
        assert again == [3.0, 3.0, 3.0]


def calls_differ() -> list[str]:
    first = dist.get_rank() == 0
    group = dist.new_group(list(range(dist.get_world_size())))
    return [
        text_of(collectives.all_reduce, tree(), "max" if first else "sum", group),
        text_of(collectives.broadcast, tree() if first else None, 0 if first else 1, group),
        text_of(collectives.broadcast, None, 0, group),
    ]


def test_other_calls_are_told_apart(two: Pool):
    """Another reduction, another source, and a source without a tree."""
    one, other = two.run(calls_differ)
    assert "op='max'" in one[0]
    assert one[0] == other[0]
    assert "src=0" in one[1]
    assert "src=1" in one[1]
    assert "no tree" in one[2]


def changed_later(check: Check) -> tuple[str, list[float]]:
    own = tree()
    collectives.all_reduce(own, check=check)
    collectives.all_reduce(own, check=check)
    if dist.get_rank() == 1:
        own = tree(x=torch.ones(1000))
    return text_of(collectives.all_reduce, own, check=check), own["x"].tolist()[:3]


def test_a_tree_that_changes_later_is_found(two: Pool):
    """At once where it is asked each time; the values stay."""
    texts = two.run(changed_later, "always")
    assert all("['x']: float32 [3] on rank 0, float32 [1000] on rank 1" in t for t, _ in texts)
    assert [values for _, values in texts] == [[4.0, 4.0, 4.0], [1.0, 1.0, 1.0]]


def test_a_tree_that_changes_later_ends_in_a_timeout():
    """Where it is asked for the first time only: no process ends, and the error names the cause."""
    pool = Pool(2, with_jax=False, timeout=timedelta(seconds=3))
    answers = pool.run_to_the_end(changed_later, "first")
    assert all("another layout than at its last call" in text for text, _ in answers)
    assert answers[1][1] == [1.0, 1.0, 1.0]


def taking_turns() -> list[list[float]]:
    found = []
    for turn in range(4):
        own = tree() if turn % 2 else tree(x=torch.full((5,), 2.0))
        found.append(collectives.all_reduce(own)["x"].tolist())
    return found


def test_two_layouts_may_take_turns(two: Pool):
    """Each is another one than the last."""
    expected = [[4.0] * 5, [2.0] * 3] * 2
    assert two.run(taking_turns) == [expected, expected]


def layouts_that_change() -> list[Any]:
    sender, found = dist.get_rank() == 0, []
    group = dist.new_group(list(range(dist.get_world_size())))
    for turn in range(4):
        own = tree(x=torch.full((turn // 2 + 1,), float(turn))) if sender else None
        found.append(collectives.broadcast(own, 0, group)["x"].tolist())
    return found


def test_a_source_may_change_its_layout_for_those_without_a_tree(two: Pool):
    """The new layout is sent, and nobody waits."""
    expected = [[0.0], [1.0], [2.0, 2.0], [3.0, 3.0]]
    assert two.run(layouts_that_change) == [expected, expected]


def refused() -> Any:
    if dist.get_rank() == 0:
        collectives.send(tree(), 1)
        collectives.send(tree(), 1)
        return "", []
    own = tree(x=torch.zeros(7))
    text = text_of(collectives.recv, own, 0)
    return text, [*own["x"].tolist(), *collectives.recv(src=0)["x"].tolist()]


def test_recv_checks_before_it_writes(two: Pool):
    """The sender is not held up, and what it sends next arrives."""
    _, (text, values) = two.run(refused)
    assert "['x']: float32 [3] in what was sent, float32 [7] in the tree" in text
    assert values == [0.0] * 7 + [1.0] * 3


def survivors() -> str:
    for turn in range(5):
        if turn == 2 and dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if text := text_of(collectives.all_reduce, tree()):
            return text
    return ""


def test_a_rank_that_dies_is_an_error_on_the_others():
    """Within the timeout of the group."""
    pool = Pool(3, with_jax=False, timeout=timedelta(seconds=5))
    first, second, dead = pool.run_to_the_end(survivors)
    assert dead is None
    assert "all_reduce(op='sum') over the ranks [0, 1, 2] did not end" in first
    assert "did not end" in second
