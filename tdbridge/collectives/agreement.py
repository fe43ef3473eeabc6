"""Whether all members hold trees of one layout, asked before anything is written.

A member that finds the call and the layout that all had the last time asks nothing. Whatever
differs from the last time is asked for on connections of its own, so that no two members ever
exchange data of two layouts: either all ask, and each raises the same error, or some ask and the
others wait for data, until the timeout of the group. Asking costs one collective of 8 bytes a
member.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from tdbridge.collectives.differences import leaf_lines, what_differs
from tdbridge.collectives.groups import Known, Members, gathered, gathered_texts
from tdbridge.collectives.handle import told
from tdbridge.errors import CollectiveError, LayoutError
from tdbridge.layout.spec import Layout

Check = Literal["first", "always", "never"]
_TREE, _NOTHING, _FAILED = 0, 1, 2
_NONE_LEFT_OUT: frozenset[str] = frozenset()


class _Word(NamedTuple):
    """What a member says of itself, in 8 bytes.

    Attributes:
        state: whether it has a tree, needs none, or failed.
        fresh: whether its tree is another one than those without a tree know of.
        what: 20 bits of the call, and of how many calls the member took part in before. One that
            missed a call, which the others did not have to wait for, is found by it.
        number: 40 bits of the leaves, or a number that was asked for.
    """

    state: int
    fresh: bool
    what: int
    number: int

    def packed(self) -> int:
        return ((self.state << 1 | self.fresh) << 20 | self.what) << 40 | self.number

    @staticmethod
    def read(word: int) -> "_Word":
        head, number = word >> 40, word & (1 << 40) - 1
        return _Word(head >> 21, bool(head >> 20 & 1), head & (1 << 20) - 1, number)


def check_argument(check: str) -> None:
    """Checks the argument `check` of every call."""
    if check not in ("first", "always", "never"):
        raise CollectiveError(f"check is 'first', 'always' or 'never', got {check!r}.")


def agree(
    members: Members,
    call: str,
    layout: Layout | None,
    check: Check,
    root: int | None = None,
    left_out: frozenset[str] = _NONE_LEFT_OUT,
) -> Layout | None:
    """The layout that the call is about: that of this member, or that of the root for one without.

    Args:
        members: who takes part.
        call: the call and its arguments, which have to be equal too.
        layout: that of the tree of this member, or None if it has no tree.
        check: as of every call.
        root: the member, by its rank in the group, that has a tree when others need none.
        left_out: the dtypes whose leaves take no part.

    Raises:
        CollectiveError: the members disagree. It says in what, equally on each.
    """
    key, known = _key(call, root), members.known
    leaves = None if layout is None else _bits_of_leaves(layout, left_out)
    if check == "never":
        if layout is None:
            raise CollectiveError(f"{call}: with check='never' every rank has to pass a tree.")
    elif check == "always" or not _as_last(known, key, call, leaves):
        with told(call, members):
            number = _ask(members, call, layout, leaves, root, left_out)
        known.last[key] = call, number
    known.calls += 1
    return _layout_of(known, key) if layout is None else layout


def numbers_of(members: Members, call: str, number: int) -> list[int]:
    """A number below 2**40 of each member, which all ask for each time.

    Raises:
        CollectiveError: a member called something else, or failed.
    """
    with told(call, members):
        words = _words(members, call, _TREE, False, number)
        if not _together(words):
            _raise(members, call, "", words)
    return [word.number for word in words]


@contextmanager
def taking_part(
    members: Members, call: str, check: Check, root: int | None = None
) -> Iterator[None]:
    """What a member does before it agrees with the others, who are told of an error in it.

    They listen if they ask each time, or have not made such a call before; else they find out by
    the timeout.
    """
    known = members.known
    if known.lost:
        raise CollectiveError(f"{call}: {known.lost}")
    try:
        yield
    except Exception as error:
        key = _key(call, root)
        listen = check == "first" and (key not in known.last or key in known.listening)
        if check == "always" or listen:
            word = _Word(_FAILED, False, _bits_of_call(members, call), 0)
            with told(call, members):
                gathered(members, [word.packed()])
                gathered_texts(members, f"{call}\n{known.calls}\n!{error}")
        raise


def _key(call: str, root: int | None) -> tuple[str, int | None]:
    return call.partition("(")[0], root


def _as_last(known: Known, key: Any, call: str, leaves: int | None) -> bool:
    """Whether nobody has to be asked."""
    if key in known.listening or key not in known.last:
        return False
    last_call, last_leaves = known.last[key]
    return last_call == call and leaves in (None, last_leaves)


def _ask(
    members: Members,
    call: str,
    layout: Layout | None,
    leaves: int | None,
    root: int | None,
    left_out: frozenset[str],
) -> int:
    """The bits of the leaves that all have."""
    key, known = _key(call, root), members.known
    fresh = layout is not None and (key not in known.listening or known.layouts.get(key) != layout)
    words = _words(members, call, _NOTHING if leaves is None else _TREE, fresh, leaves or 0)
    trees = {word.number for word in words if word.state == _TREE}
    asked = words if root is None else [words[root]]  # who has to have a tree
    if not (_together(words) and len(trees) == 1 and all(word.state == _TREE for word in asked)):
        _raise(members, call, leaf_lines(layout, left_out), words)
    if all(word.state == _TREE for word in words):
        assert layout is not None  # noqa: S101 - this member is one of them
        known.listening.discard(key)
        known.layouts[key] = layout
    elif root is not None:
        if words[root].fresh:
            known.layouts[key] = _travelled(members, call, layout, root)
        known.listening.add(key)
    return trees.pop()


def _words(members: Members, call: str, state: int, fresh: bool, number: int) -> list[_Word]:
    own = _Word(state, fresh, _bits_of_call(members, call), number)
    return [_Word.read(word) for (word,) in gathered(members, [own.packed()])]


def _together(words: list[_Word]) -> bool:
    """Whether all members called the same, and none failed."""
    return len({word.what for word in words}) == 1 and _FAILED not in {w.state for w in words}


def _travelled(members: Members, call: str, layout: Layout | None, root: int) -> Layout | str:
    """The layout of the root, which goes to all: as text, which who needs it reads."""
    text = ""
    if members.rank == root:
        assert layout is not None  # noqa: S101 - the root has a tree
        try:
            text = layout.to_json()
        except LayoutError as error:
            text = f"!{error}"
    text = gathered_texts(members, text)[root]
    if text.startswith("!"):
        raise LayoutError(f"{call}: a rank passed None, but the layout cannot be sent: {text[1:]}")
    return layout if members.rank == root and layout is not None else text


def _layout_of(known: Known, key: Any) -> Layout:
    """The layout for a member that has no tree."""
    found = known.layouts[key]
    if isinstance(found, str):
        found = known.layouts[key] = Layout.from_json(found)
    return found


def _bits_of_call(members: Members, call: str) -> int:
    return _bits(f"{members.known.calls} {call}", 20)


@lru_cache(maxsize=1024)
def _bits_of_leaves(layout: Layout, left_out: frozenset[str]) -> int:
    """Of the leaves alone: classes, batch sizes and other values move no byte."""
    return _bits(f"{sorted(left_out)} {Layout(layout.leaves, ()).fingerprint}", 40)


def _bits(text: str, count: int) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 64 - count


def _raise(members: Members, call: str, lines: str, words: list[_Word]) -> None:
    """Raises what differs, from what each member sends of itself.

    Members that are not at the same call can exchange nothing any more: what one of them sends
    next, the others would take for something else.
    """
    known = members.known
    texts = gathered_texts(members, f"{call}\n{known.calls}\n{lines}")
    calls, steps, bodies = zip(*[text.split("\n", 2) for text in texts], strict=True)
    without = [word.state == _NOTHING for word in words]
    text = what_differs(members.ranks, calls, steps, bodies, without)
    if len({*steps}) > 1:
        known.lost = f"{text} Make a new group."
    raise CollectiveError(text)
