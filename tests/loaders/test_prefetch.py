"""A generator that runs ahead in a thread: order, depth, errors, and that nothing is left."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

import jax
import pytest
import torch

from tdbridge.loaders.prefetch import Ahead


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "tdbridge-loader"]


@pytest.fixture(autouse=True)
def nothing_is_left():
    assert threads() == []
    yield
    gc.collect()
    assert threads() == []


def until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_the_items_come_in_order(depth: int):
    ahead = Ahead((i for i in range(20)), depth)
    assert list(ahead) == list(range(20))
    assert list(ahead) == []


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_it_is_as_far_ahead_as_it_may_be_and_no_further(depth: int):
    made = []

    def items() -> Generator[int]:
        for i in range(20):
            made.append(i)
            yield i

    ahead = Ahead(items(), depth)
    for taken in range(5):
        until(lambda expected=taken + depth: len(made) == expected)
        time.sleep(0.01)
        assert len(made) == taken + depth
        next(ahead)
    ahead.close()


def test_an_error_comes_after_the_items_before_it_with_its_traceback():
    def items() -> Generator[int]:
        yield 0
        yield 1
        raise KeyError("two")

    ahead = Ahead(items(), 5)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(KeyError, match="two") as error:
        next(ahead)
    assert any(entry.name == "items" for entry in error.traceback)
    assert list(ahead) == []


def test_closing_ends_the_generator_in_its_thread():
    ended = []

    def items() -> Generator[int]:
        try:
            yield from range(100)
        finally:
            ended.append(threading.current_thread().name)

    ahead = Ahead(items(), 2)
    assert next(ahead) == 0
    ahead.close()
    assert ended == ["tdbridge-loader"]
    assert list(ahead) == []
    ahead.close()


def test_a_collected_one_ends_its_thread():
    ahead = Ahead((i for i in range(100)), 2)
    next(ahead)
    del ahead
    assert threads() == []


def test_every_consumer_that_waits_gets_the_end():
    go, found = threading.Event(), []

    def items() -> Generator[int]:
        go.wait(30)
        yield from range(3)

    ahead = Ahead(items(), 1)
    consumers = [threading.Thread(target=lambda: found.extend(ahead), daemon=True) for _ in "abc"]
    for consumer in consumers:
        consumer.start()
    go.set()
    for consumer in consumers:
        consumer.join(30)
    assert not any(consumer.is_alive() for consumer in consumers)
    assert sorted(found) == [0, 1, 2]


def test_closing_ends_the_wait_of_a_consumer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tdbridge.loaders.prefetch.PATIENCE", 0.01)
    go = threading.Event()
    ahead = Ahead((go.wait(30) for _ in range(3)), 1)
    found = []
    consumer = threading.Thread(target=lambda: found.extend(ahead), daemon=True)
    consumer.start()
    ahead.close()
    consumer.join(30)
    assert not consumer.is_alive()
    assert found == []
    go.set()
    ahead.thread.join()


FORK = """
import os, sys
from tdbridge.loaders.prefetch import Ahead
ahead = Ahead((i for i in range(9)), 1)
next(ahead)
child = os.fork()
if child == 0:
    try:
        list(ahead)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(list(ahead))
"""


def test_a_forked_process_has_an_error_and_its_parent_goes_on():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    error, rest = done.stdout.splitlines()
    assert "is not in this process" in error
    assert rest == str([*range(1, 9)])


class Item:
    pass


def test_no_item_outlives_its_consumer():
    ahead = Ahead((Item() for _ in range(9)), 1)
    for _ in range(4):
        item = weakref.ref(next(ahead))
        until(lambda ref=item: ref() is None)
    ahead.close()


def test_items_that_were_not_taken_go_with_it():
    made: list[Any] = []

    def items() -> Generator[Item]:
        for _ in range(5):
            item = Item()
            made.append(weakref.ref(item))
            yield item
            del item

    ahead = Ahead(items(), 3)
    until(lambda: len(made) == 3)
    ahead.close()
    assert [ref() for ref in made] == [None] * 3


def test_the_settings_of_a_thread_are_those_where_it_was_made():
    def items() -> Generator[Any]:
        yield torch.is_grad_enabled(), jax.numpy.arange(1).dtype.name

    device = jax.devices("cpu")[1]
    with torch.no_grad(), jax.enable_x64(True), jax.default_device(device):
        assert list(Ahead(items(), 1)) == [(False, "int64")]
        where = Ahead((jax.numpy.ones(1).devices() for _ in range(1)), 1)
        assert list(where) == [{device}]
    assert list(Ahead(items(), 1)) == [(True, "int32")]


EXIT = """
import itertools, sys, jax, torch
from tdbridge.loaders.prefetch import Ahead
def items():
    try:
        for i in itertools.count():
            yield jax.device_put(torch.ones(1000).numpy() + i).block_until_ready()
    finally:
        print("ended")
ahead = Ahead(items(), 2)
next(ahead)
print("taken", flush=True)
{last}
"""


@pytest.mark.parametrize("last", ["sys.exit(3)", "raise ValueError"])
def test_the_interpreter_exits_with_one_that_runs(last: str):
    done = subprocess.run(
        [sys.executable, "-c", EXIT.format(last=last)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["taken", "ended"]
    assert done.returncode == {"sys.exit(3)": 3, "raise ValueError": 1}[last]
    assert ("Traceback" in done.stderr) == (last == "raise ValueError")
