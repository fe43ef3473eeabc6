"""A generator that runs ahead of its consumer, in a thread."""

import atexit
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import jax
import torch

from tdbridge.errors import LoaderError

T = TypeVar("T")
PATIENCE = 10.0
"""Seconds that closing waits for a source that is in the middle of a batch."""


class Ahead(Iterator[T]):
    """Goes through a generator in a thread, at most `depth` items ahead of what was taken.

    The thread ends with the generator, with its first error, with `close`, and when this object is
    collected or the interpreter exits: it refers to nothing that would keep this object alive. An
    error is raised where the item would have been taken, with its traceback.

    Args:
        items: the generator, which is closed in the thread. Processes are to be forked before: in
            the child of another thread, Python destroys what the main one had for itself, and a
            process group of torch waits there for threads that do not exist.
        depth: how many items may be ready that were not taken, at least 1.

    Attributes:
        thread: the thread; a source that is in the middle of an item may keep it after `close`.

    Raises:
        LoaderError: in a forked process, which has the object but not the thread.
    """

    def __init__(self, items: Generator[T], depth: int) -> None:
        self._ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        # No semaphore: it would be locked for ever by a fork, or by a collection of this object, in
        # the middle of its own code.
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(depth):
            self._permits.put(None)
        self._stop = threading.Event()
        self._process = os.getpid()
        self.thread = threading.Thread(
            target=_run,
            args=(items, settings_here(), self._ready.put, self._permits, self._stop),
            name="tdbridge-loader",
            daemon=True,  # for others, Python waits before it calls what ends this one
        )
        self._end = partial(_end, self.thread, self._permits, self._stop)
        # Now, so that it is called before what the source has left to be called at exit.
        atexit.register(self._end)
        self.thread.start()

    def __next__(self) -> T:
        item = self._take()
        self._permits.put(None)
        return item

    def close(self) -> None:
        """Ends the thread; what is ready is dropped. There is nothing more to take."""
        atexit.unregister(self._end)
        self._end()
        with suppress(Empty):
            while True:  # an error holds its frames, and these hold the queue
                self._ready.get_nowait()
        self._ready.put((None, StopIteration()))  # for each consumer, one that waits included

    __del__ = close

    def _take(self) -> Any:
        if os.getpid() != self._process:
            raise LoaderError(
                "the thread that prepares batches is not in this process, which was forked from "
                "that of the loader: make another loader here."
            )
        item, error = self._ready.get()
        if error is None:
            return item
        self.close()
        try:
            raise error
        finally:
            del error  # its traceback has this frame, and with it all that is alive in it


def _run(
    items: Generator[Any],
    settings: Callable[[], ExitStack],
    put: Callable[[Any], None],
    permits: SimpleQueue[None],
    stop: threading.Event,
) -> None:
    try:
        with settings(), closing(items):
            while permits.get() is None and not stop.is_set():
                put((next(items), None))  # no name: it would keep the item alive
    except BaseException as error:  # noqa: BLE001 - it is the consumer's, StopIteration included
        put((None, error))


def _end(thread: threading.Thread, permits: SimpleQueue[None], stop: threading.Event) -> None:
    stop.set()
    permits.put(None)
    if thread is not threading.current_thread():  # any thread may collect garbage
        thread.join(PATIENCE)


def settings_here() -> Callable[[], ExitStack]:
    """What torch and JAX keep for each thread, to be had in another one as it is here."""
    grad = torch.is_grad_enabled()
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(jax.enable_x64(x64))
        stack.enter_context(jax.default_device(device))
        return stack

    return enter
