"""The public calls: whole trees, by the names and in the order of torch.distributed."""

from functools import partial
from typing import Any, Literal

from jax.sharding import Mesh

from tdbridge.collectives import axis, exchanges, mesh, point_to_point, ragged, reductions
from tdbridge.collectives.agreement import Check, check_argument
from tdbridge.collectives.axis import is_axis
from tdbridge.collectives.axis_leaves import refused
from tdbridge.collectives.groups import Members, members_of
from tdbridge.collectives.handle import Handle
from tdbridge.collectives.ops import SUM, op_of
from tdbridge.collectives.wire import Where
from tdbridge.errors import CollectiveError

To = Literal["torch", "jax"]


def all_reduce(
    tree: Any,
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    where: Where | None = None,
    accumulate: Any = None,
    check: Check = "first",
) -> Any:
    """Reduces the leaves of `tree` over the members of a group: a message per dtype.

    A consolidated TensorDict (`tdbridge.consolidate`) is reduced in place, in its own buffer. Any
    other tree is copied into one buffer first. Members may hold TensorDicts, ArrayDicts and plain
    pytrees side by side, as long as paths, dtypes and shapes agree.

    Of a DTensor the local shard is reduced, in place, and it stays a DTensor. The group has to run
    along mesh dimensions over which it is replicated, as `(mesh, "replicate")` of HSDP does, so
    that its members hold the same shard. `reduce` and `broadcast` follow the same rule; every other
    call refuses DTensors.

    Args:
        tree: a TensorDict, a tensorclass, an ArrayDict, a packed one, or a pytree of tensors and
            arrays.
        op: `"sum"`, `"mean"`, `"max"`, `"min"`, `"product"`, a `torch.distributed.ReduceOp`, or
            `premul_sum(factor)`. `"mean"` is for floats and complex numbers; booleans have `"max"`
            and `"min"`.
        group: a ProcessGroup, a DeviceMesh of one dimension, `(DeviceMesh, dimension)`, or None
            for the default group. Inside of `jax.shard_map` the name of an axis, or a tuple of
            them. In a job of jax.distributed a `jax.sharding.Mesh`: its processes are the members.
        async_op: give a `Handle` at once; its `wait()` gives the result.
        where: which leaves, by a predicate on dtype such as `tensordict.is_floating`, called with
            an empty tensor. Others stay as they are.
        accumulate: a dtype to add up narrower floats in, such as `"float32"`. The messages have
            its width.
        check: `"first"` asks whether all members hold the same tree when it is another one than at
            the last call of this kind; `"always"` each time, by 8 bytes a member; `"never"` not
            at all, which is for trees that cannot differ. The same on every member.

    Returns:
        `tree` itself with its tensors written to, if it holds tensors; jax and numpy arrays are
        not written to, so that an ArrayDict comes back as a new one. A `Handle` if `async_op`.

    Raises:
        CollectiveError: a member holds another tree, and every member raises this error, which
            lists the leaves that differ and where; nothing was written then. Or a leaf has no
            such reduction, or is a DTensor of which the members hold different shards or sums that
            are still to be done; or a member ended, or did not come within the timeout of the
            group, and the values are undefined.
        LeafTypeError: a leaf is no dense tensor, or cannot be written to, as an expanded one.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from tensordict import TensorDict
        >>> from tdbridge.collectives import premul_sum
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> td = TensorDict(x=torch.ones(3), n=torch.arange(2))
        >>> all_reduce(td, premul_sum(0.5), where=torch.is_floating_point)["x"].tolist()
        [0.5, 0.5, 0.5]
        >>> dist.destroy_process_group()
    """
    op = op_of(op)
    if _is_axis(group, async_op):
        return axis.all_reduce(tree, op, group, where, reductions.wide_of(accumulate))
    members = _members(group, check)
    engine = _engine(members, reductions)
    return _given(engine.all_reduce(tree, op, members, where, accumulate, check), async_op)


def reduce(
    tree: Any,
    dst: int | None = None,
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    where: Where | None = None,
    accumulate: Any = None,
    check: Check = "first",
) -> Any:
    """As `all_reduce`, for one member alone.

    Args:
        tree: as of `all_reduce`. On other members than `dst` it stays as it is.
        dst: the global rank that gets the result.
        op: as of `all_reduce`.
        group: as of `all_reduce`, but of torch.distributed.
        async_op: give a `Handle` at once.
        group_dst: the rank within the group instead of `dst`.
        where: as of `all_reduce`.
        accumulate: as of `all_reduce`.
        check: as of `all_reduce`.

    Returns:
        On `dst` what `all_reduce` gives, None elsewhere. A `Handle` if `async_op`.

    Raises:
        CollectiveError: as of `all_reduce`.
    """
    members = _torch_members("reduce", group, check)
    dst = members.member(dst, group_dst, "dst")
    handle = reductions.reduce(tree, dst, op_of(op), members, where, accumulate, check)
    return _given(handle, async_op)


def reduce_scatter(
    trees: Any,
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    where: Where | None = None,
    accumulate: Any = None,
    check: Check = "first",
) -> Any:
    """Reduces one tree for each member, and gives each member its own.

    Args:
        trees: a list with a tree for each member, in the order of ranks, all of one layout; or one
            tree with a dimension of that length in front.
        op: as of `all_reduce`.
        group: as of `all_reduce`.
        async_op: give a `Handle` at once.
        where: as of `all_reduce`; other leaves are those of this member's own tree.
        accumulate: as of `all_reduce`.
        check: as of `all_reduce`.

    Returns:
        A new tree of the kind of one of `trees`. A `Handle` if `async_op`.

    Raises:
        CollectiveError: as of `all_reduce`; or there are more or fewer trees than members.
    """
    op = op_of(op)
    if _is_axis(group, async_op):
        return axis.reduce_scatter(trees, op, group, where, reductions.wide_of(accumulate))
    members = _members(group, check)
    engine = _engine(members, reductions)
    return _given(engine.reduce_scatter(trees, op, members, where, accumulate, check), async_op)


def broadcast(
    tree: Any,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    to: To = "torch",
    check: Check = "first",
) -> Any:
    """Gives every member the values of one: one message for the whole tree.

    Args:
        tree: as of `all_reduce`. On other members than `src` it is written to, or None: then the
            tree is made of what comes. Its layout is sent once, and as long as some member passes
            None, each call costs 8 bytes a member. Pass the tree of the last call to save them.
            A member that passed one in the last call may pass None only while `src` has the same
            leaves; it gets a tree like its last one.
        src: the global rank whose tree it is.
        group: as of `all_reduce`.
        async_op: give a `Handle` at once.
        group_src: the rank within the group instead of `src`.
        to: what is made where None was passed: `"torch"` gives a consolidated TensorDict, `"jax"`
            an ArrayDict of the same dtypes, also those of 64 bits. Non-tensor values come along if
            they have a JSON form.
        check: as of `all_reduce`.

    Returns:
        `tree` with the values of `src`, written in place where it holds tensors; an ArrayDict is a
        new one. A `Handle` if `async_op`.

    Raises:
        CollectiveError: as of `all_reduce`.
        LayoutError: a non-tensor value has no JSON form, and a member passed None. Every member
            raises it.
    """
    if _is_axis(group, async_op):
        return axis.broadcast(tree, _position(src, group_src), group)
    members = _members(group, check, to)
    src = members.member(src, group_src, "src")
    engine = _engine(members, exchanges)
    return _given(engine.broadcast(tree, src, members, check, to), async_op)


def all_gather(
    tree: Any,
    group: Any = None,
    async_op: bool = False,
    *,
    stacked: bool = True,
    pad: bool = False,
    out: Any = None,
    check: Check = "first",
) -> Any:
    """Gives every member the trees of all: one message for the whole tree.

    Args:
        tree: as of `all_reduce`. It is only read.
        group: as of `all_reduce`.
        async_op: give a `Handle` at once.
        stacked: give one tree, whose leaves and batch sizes have a dimension more in front, of the
            length of the group. It views the memory that the messages came to, a member apart, so
            that it is not consolidated. False gives a list of trees, consolidated TensorDicts.
        pad: members have batches of different lengths, in the first dimension. Leaves are padded
            with zeros to the longest; in the list each has its own length. The lengths cost 8 bytes
            a member each time.
        out: what an earlier call gave for a tree of this layout, to be written to instead of new
            memory. For TensorDicts over torch.distributed, stacked and not padded.
        check: as of `all_reduce`.

    Returns:
        One tree or a list of trees, in the order of ranks, of the kind of `tree`: ArrayDicts for an
        ArrayDict. Non-tensor values are those of this member. A `Handle` if `async_op`.

    Raises:
        CollectiveError: as of `all_reduce`; or the tree has leaves that no stack is made of.
    """
    in_place = out is not None
    if in_place and (pad or not stacked or isinstance(group, Mesh) or is_axis(group)):
        raise CollectiveError("out= is for stacked trees over torch.distributed, without pad=True.")
    if _is_axis(group, async_op):
        if pad:
            raise refused("pad=True")
        return axis.all_gather(tree, group, stacked)
    members = _members(group, check)
    if in_place:
        return _given(exchanges.all_gather(tree, members, stacked, check, out), async_op)
    engine = _engine(members, exchanges)
    gather = partial(ragged.all_gather, engine.all_gather) if pad else engine.all_gather
    return _given(gather(tree, members, stacked, check), async_op)


def gather(
    tree: Any,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    stacked: bool = True,
    check: Check = "first",
) -> Any:
    """As `all_gather`, for one member alone: `dst`, by its global rank, or `group_dst`.

    Returns:
        On `dst` what `all_gather` gives, None elsewhere. A `Handle` if `async_op`.
    """
    members = _torch_members("gather", group, check)
    dst = members.member(dst, group_dst, "dst")
    return _given(exchanges.gather(tree, dst, members, stacked, check), async_op)


def scatter(
    tree: Any,
    scatter_list: Any = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    to: To = "torch",
    check: Check = "first",
) -> Any:
    """Gives each member one of the trees that `src` has: one message for a whole tree.

    Args:
        tree: where to write, or None, as of `broadcast`.
        scatter_list: on `src`, a tree for each member, or one tree with a dimension more in front.
        src: the global rank that has them.
        group: as of `all_reduce`.
        async_op: give a `Handle` at once.
        group_src: the rank within the group instead of `src`.
        to: as of `broadcast`.
        check: as of `all_reduce`.

    Returns:
        The tree of this member; on `src`, where `tree` is None, a new one of the kind of those in
        `scatter_list`. A `Handle` if `async_op`.

    Raises:
        CollectiveError: as of `all_reduce`; or there are more or fewer trees than members.
    """
    members = _torch_members("scatter", group, check, to)
    src = members.member(src, group_src, "src")
    return _given(exchanges.scatter(tree, scatter_list, src, members, check, to), async_op)


def all_to_all(
    trees: Any,
    group: Any = None,
    async_op: bool = False,
    *,
    stacked: bool = True,
    check: Check = "first",
) -> Any:
    """Gives each member one tree of each member: one message for a whole tree.

    Args:
        trees: a tree for each member, as of `reduce_scatter`.
        group: as of `all_reduce`.
        async_op: give a `Handle` at once.
        stacked: as of `all_gather`.
        check: as of `all_reduce`.

    Returns:
        What the members had for this one, in the order of ranks, as `all_gather` gives it.

    Raises:
        CollectiveError: as of `all_reduce`; or there are more or fewer trees than members.
    """
    if _is_axis(group, async_op):
        return axis.all_to_all(trees, group, stacked)
    members = _members(group, check)
    engine = _engine(members, exchanges)
    return _given(engine.all_to_all(trees, members, stacked, check), async_op)


def send(
    tree: Any,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    check: Check = "first",
) -> None:
    """Sends a tree to `recv` of one other member: a head of 24 bytes, then one message.

    The layout goes along the first time that the member gets it by that tag.

    Args:
        tree: as of `all_reduce`. It is only read.
        dst: the global rank of the receiver.
        group: a group of torch.distributed, as of `all_reduce`.
        tag: which `recv` it is for.
        group_dst: the rank within the group instead of `dst`.
        check: `"never"` sends no head; then the receiver must say so too, and have a tree of the
            same layout. The others are one here.

    Raises:
        CollectiveError: the receiver ended, or did not come within the timeout of the group.
        LayoutError: a non-tensor value has no JSON form.
    """
    isend(tree, dst, group, tag, group_dst, check=check).wait()


def isend(
    tree: Any,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    check: Check = "first",
) -> Handle:
    """As `send`, without waiting: `wait()` of what it gives does."""
    members = _torch_members("send", group, check)
    dst = members.member(dst, group_dst, "dst")
    return point_to_point.isend(tree, dst, members, tag, check)


def recv(
    tree: Any = None,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    to: To = "torch",
    check: Check = "first",
) -> Any:
    """Receives what `send` of another member sent.

    Args:
        tree: where to write, or None, as of `broadcast`.
        src: the global rank of the sender; None takes what comes first.
        group: as of `send`.
        tag: that of the `send`.
        group_src: the rank within the group instead of `src`.
        to: as of `broadcast`.
        check: as of `send`.

    Returns:
        `tree` itself if its tensors were written to, else a new one.

    Raises:
        CollectiveError: what was sent has another layout than `tree`, which is as it was then; the
            error lists the leaves that differ. Or nothing came within the timeout.
    """
    return irecv(tree, src, group, tag, group_src, to=to, check=check).wait()


def irecv(
    tree: Any = None,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    to: To = "torch",
    check: Check = "first",
) -> Handle:
    """As `recv`, without waiting: `wait()` of what it gives does.

    What follows the head is received by `wait()` alone. So where two members exchange trees, each
    begins with `isend`, then receives, then waits for what it sent; `send` between `irecv` and its
    `wait()`, on both, would wait forever. Several receives from one member are in their order.
    """
    members = _torch_members("recv", group, check, to)
    if src is not None or group_src is not None:
        src = members.member(src, group_src, "src")
    return point_to_point.irecv(tree, src, members, tag, check, to)


def _given(handle: Handle, async_op: bool) -> Any:
    return handle if async_op else handle.wait()


def _is_axis(group: Any, async_op: bool) -> bool:
    if not is_axis(group):
        return False
    if async_op:
        raise refused("async_op=True")
    return True


def _position(src: int | None, group_src: int | None) -> int:
    if (src is None) == (group_src is None):
        raise CollectiveError("pass either src, the position along the axis, or group_src.")
    return src if src is not None else group_src  # type: ignore[return-value]


def _members(group: Any, check: str, to: str = "torch") -> Members:
    check_argument(check)
    if to not in ("torch", "jax"):
        raise CollectiveError(f'to is "torch" or "jax", got {to!r}.')
    return mesh.members_of_mesh(group) if isinstance(group, Mesh) else members_of(group)


def _engine(members: Members, of_torch: Any) -> Any:
    return mesh if isinstance(members, mesh.MeshMembers) else of_torch


def _torch_members(call: str, group: Any, check: str, to: str = "torch") -> Members:
    if isinstance(group, Mesh) or is_axis(group):
        raise refused(call)
    return _members(group, check, to)
