"""torch.distributed's collectives: what must fit between ranks, and how a rank takes part that has nothing to say.

One table, :data:`COLLECTIVES`, for the names of torch 2.1 to 2.15; those missing in the torch at hand
are passed over. It says for each what a rank that has run out of batches contributes:

================================================ ==================================================================
collective                                       contribution of a rank without batches
================================================ ==================================================================
barrier                                          it meets the others
all_reduce, reduce, reduce_scatter and kin       the neutral element: SUM, AVG, BOR, BXOR 0; PRODUCT 1; BAND all ones; MIN, MAX the
                                                 largest and the smallest value of the dtype. AVG still divides by the world size
all_gather and kin, gather                       nothing, if the tensor has no elements; 0 for a single number (a count, a size, a sum;
                                                 a mean over the ranks then is as DDP's of the gradients); else: error
gather, gather_object, reduce to that rank       anything: nobody reads the result
broadcast, broadcast_object_list from others     it receives, and drops what it got
broadcast, broadcast_object_list from that rank  what it last sent from the same place in its training loop; if it never did: error
scatter, scatter_object_list from others         it receives, and drops what it got
scatter from that rank, all_gather_object,       error: no honest value exists
gather_object, all_to_all, new_group, ...
================================================ ==================================================================

monitored_barrier is not in the table: scripts use its timeout to find out that a rank has finished.
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
import pickle
import zlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist

logger = logging.getLogger("ddpfix")

# What is kept of a broadcast from inside a training loop, to be repeated: flags and the like.
_KEPT_BYTES = 1 << 20
_KEPT_PLACES = 64


class Operation(NamedTuple):
    """A collective with its arguments, as one rank calls it.

    Arguments:
        name: with what it works on, ``"all_reduce(float32[1], SUM)"``.
        signature: hash of everything that must be the same on all ranks for the call to work.
        group: name of its process group.
        mirror: what :func:`take_part` needs, JSON-able; ``None`` if nobody can take part.
        why_not: why nobody can take part without something of its own.
        reader: the only rank (global) that sees what the others contribute.
        source: the only rank (global) whose contribution counts.
        asynchronous: ``async_op=True``.
        sent: for the source of a broadcast: the value, to be kept.
        reduced: for a reduction: this rank's operand.
    """

    name: str
    signature: int
    group: str = ""
    mirror: Optional[Dict[str, Any]] = None
    why_not: Optional[str] = None
    reader: Optional[int] = None
    source: Optional[int] = None
    asynchronous: bool = False
    sent: Any = None
    reduced: Optional[torch.Tensor] = None


class _Unreadable(Exception):
    """The arguments are not what the collective takes, or something that cannot be mirrored."""


# -- describing ------------------------------------------------------------------------


class _Parts:
    """What a row of the table fills in."""

    def __init__(self, arguments: Dict[str, Any], group: dist.ProcessGroup) -> None:
        self.arguments = arguments
        self.group = group
        self.fits: List[Any] = []  # goes into the signature
        self.words: List[str] = []
        self.mirror: Dict[str, Any] = {}
        self.why_not: Optional[str] = None
        self.possible = True  # to take part at all, whatever is then in the result
        self.reader: Optional[int] = None
        self.source: Optional[int] = None
        self.sent: Any = None
        self.reduced: Optional[torch.Tensor] = None

    def impossible(self, why: str) -> None:
        """Nobody can take part with nothing of its own."""
        self.possible, self.why_not = False, why

    def tensor(self, *names: str) -> torch.Tensor:
        for name in names:
            value = self.arguments.get(name)
            if isinstance(value, torch.Tensor):
                return value
        raise _Unreadable(f"no tensor {names[0]}")

    def tensors(self, *names: str) -> List[torch.Tensor]:
        for name in names:
            value = self.arguments.get(name)
            if isinstance(value, (list, tuple)) and value and all(isinstance(t, torch.Tensor) for t in value):
                return list(value)
        raise _Unreadable(f"no tensors {names[0]}")

    def carries(self, tensor: torch.Tensor) -> None:
        """The mirroring rank needs a tensor like this one."""
        if tensor.layout is not torch.strided:
            self.impossible("a sparse tensor has no neutral element of a known shape")
        self.mirror.update(dtype=str(tensor.dtype)[6:], numel=tensor.numel(), device=tensor.device.type)
        self.words.append(f"{str(tensor.dtype)[6:]}{list(tensor.shape)}")

    def operator(self) -> None:
        op = self.arguments.get("op")
        name = getattr(op, "name", None) or getattr(getattr(op, "op", None), "name", None)
        if name not in _NEUTRAL:
            self.impossible(f"the reduction {name or op} has no neutral element")
        self.mirror["op"] = name
        self.fits.append(name)
        self.words.append(str(name))

    def root(self, name: str) -> int:
        """The global rank named by ``src``/``group_src`` or ``dst``/``group_dst``."""
        rank, in_group = self.arguments.get(name), self.arguments.get(f"group_{name}")
        if rank is None:
            # gather and reduce fall back on rank 0 of the group (distributed_c10d.gather, torch 2.6 and up).
            rank = dist.get_global_rank(self.group, 0 if in_group is None else in_group)
        self.mirror[name] = int(rank)
        self.fits.append(int(rank))
        return int(rank)


def _barrier(parts: _Parts) -> None:
    pass


def _all_reduce(parts: _Parts) -> None:
    tensor = parts.reduced = parts.tensor("tensor")
    parts.carries(tensor)
    parts.fits += [tensor.dtype, tensor.numel() if tensor.layout is torch.strided else -1]
    parts.operator()


def _reduce(parts: _Parts) -> None:
    _all_reduce(parts)
    parts.reader = parts.root("dst")


def _broadcast(parts: _Parts) -> None:
    tensor = parts.tensor("tensor")
    parts.carries(tensor)
    # A bool may be received as a byte: only the size must fit.
    parts.fits += [tensor.numel() * tensor.element_size()]
    parts.source = parts.root("src")
    if parts.source == dist.get_rank():
        parts.sent = tensor


def _broadcast_objects(parts: _Parts) -> None:
    objects = parts.arguments["object_list"]
    device = parts.arguments.get("device")
    parts.mirror.update(number=len(objects), device=torch.device(device).type if device is not None else None)
    parts.fits.append(len(objects))
    parts.source = parts.root("src")
    if parts.source == dist.get_rank():
        parts.sent = objects


def _gathers(parts: _Parts, tensor: torch.Tensor) -> None:
    parts.carries(tensor)
    if tensor.numel() > 1:
        parts.why_not = f"it has no {tensor.numel()} values of its own to be gathered, and zeros would pass for data"


def _all_gather(parts: _Parts) -> None:
    outputs, tensor = parts.tensors("tensor_list"), parts.tensor("tensor")
    _gathers(parts, tensor)
    if any(output.numel() != tensor.numel() for output in outputs):
        parts.impossible("the ranks gather tensors of different sizes")
    # Not this rank's own tensor: with NCCL the ranks' sizes may differ.
    parts.fits += [tensor.element_size() * sum(output.numel() for output in outputs)]


def _all_gather_into_tensor(parts: _Parts) -> None:
    output, tensor = parts.tensor("output_tensor", "output"), parts.tensor("input_tensor", "input")
    _gathers(parts, tensor)
    parts.fits += [output.element_size() * output.numel()]


def _gather(parts: _Parts) -> None:
    _gathers(parts, parts.tensor("tensor"))
    parts.reader = parts.root("dst")


def _reduce_scatter(parts: _Parts) -> None:
    inputs = parts.tensors("input_list")
    output = parts.tensor("output")
    parts.carries(output)
    if any(tensor.numel() != output.numel() for tensor in inputs):
        parts.impossible("the ranks receive tensors of different sizes")
    parts.fits += [output.dtype, sum(tensor.numel() for tensor in inputs)]
    parts.operator()


def _reduce_scatter_tensor(parts: _Parts) -> None:
    output, tensor = parts.tensor("output"), parts.tensor("input")
    parts.carries(output)
    parts.fits += [output.dtype, tensor.numel()]
    parts.operator()


def _scatter(parts: _Parts) -> None:
    parts.carries(parts.tensor("tensor"))
    parts.source = parts.root("src")


def _scatter_objects(parts: _Parts) -> None:
    parts.source = parts.root("src")


def _gather_object(parts: _Parts) -> None:
    parts.reader = parts.root("dst")
    parts.why_not = "the reader would find an object of that rank where there is none"


def _impossible(why: str) -> Callable[[_Parts], None]:
    def row(parts: _Parts) -> None:
        parts.impossible(why)

    return row


_NO_OBJECT = _impossible("the others would find an object of that rank where there is none")
_NO_EXCHANGE = _impossible("each rank sends something of its own to each other one")
_NO_LIST = _impossible("a list of tensors of any shapes is gathered")
_NO_GROUP = _impossible("all ranks must keep the new process group")

#: Every collective that all ranks of a group call: for each its kind (kinds can pair with each other), and what it does.
COLLECTIVES: Dict[str, Tuple[str, Callable[[_Parts], None]]] = {
    "_all_gather_base": ("all_gather", _all_gather_into_tensor),
    "_reduce_scatter_base": ("reduce_scatter", _reduce_scatter_tensor),
    "all_gather": ("all_gather", _all_gather),
    "all_gather_coalesced": ("all_gather_coalesced", _NO_LIST),
    "all_gather_into_tensor": ("all_gather", _all_gather_into_tensor),
    "all_gather_object": ("all_gather_object", _NO_OBJECT),
    "all_gather_single": ("all_gather", _all_gather_into_tensor),
    "all_reduce": ("all_reduce", _all_reduce),
    "all_reduce_coalesced": ("all_reduce_coalesced", _impossible("a list of tensors of any shapes is reduced")),
    "all_to_all": ("all_to_all", _NO_EXCHANGE),
    "all_to_all_single": ("all_to_all", _NO_EXCHANGE),
    "barrier": ("barrier", _barrier),
    "broadcast": ("broadcast", _broadcast),
    "broadcast_object_list": ("broadcast_object_list", _broadcast_objects),
    "gather": ("gather", _gather),
    "gather_object": ("gather_object", _gather_object),
    "new_group": ("new_group", _NO_GROUP),
    "reduce": ("reduce", _reduce),
    "reduce_scatter": ("reduce_scatter", _reduce_scatter),
    "reduce_scatter_single": ("reduce_scatter", _reduce_scatter_tensor),
    "reduce_scatter_tensor": ("reduce_scatter", _reduce_scatter_tensor),
    "scatter": ("scatter", _scatter),
    "scatter_object_list": ("scatter_object_list", _scatter_objects),
    "split_group": ("split_group", _NO_GROUP),
}


def describe(
    name: str, original: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any], group: dist.ProcessGroup
) -> Operation:
    """Describe a call of a collective.

    Arguments:
        name: a key of :data:`COLLECTIVES`.
        original: torch's function.
        args, kwargs: what the script calls it with.
        group: the process group of the call.
    """
    kind, row = COLLECTIVES[name]
    members = group_key(group)
    try:
        arguments = _signature_of(original).bind(*args, **kwargs).arguments
        if "op" in _signature_of(original).parameters:
            arguments.setdefault("op", dist.ReduceOp.SUM)
        parts = _Parts(arguments, group)
        row(parts)
    except Exception as error:  # bad arguments: torch itself says so, in a moment
        logger.debug("the arguments of %s could not be read: %s", name, error)
        return Operation(name, _hash(kind, members), members, why_not="its arguments could not be read")
    mirror = {"name": name, "group": members, **parts.mirror} if parts.possible and members else None
    return Operation(
        f"{name}({', '.join(parts.words)})" if parts.words else name,
        _hash(kind, members, *parts.fits),
        members,
        mirror,
        parts.why_not,
        parts.reader,
        parts.source,
        bool(arguments.get("async_op")),
        parts.sent,
        parts.reduced,
    )


def unique(name: str, group: Optional[dist.ProcessGroup] = None) -> Operation:
    """Something else that all ranks do together, and that nobody can take part in halfway."""
    members = group_key(group) if group is not None else ""
    return Operation(name, _hash(name, members), members, why_not="it is not a collective that could be mirrored")


def alike(mirror: Dict[str, Any]) -> bool:
    """Whether it has no root, and is no barrier."""
    return mirror["name"] != "barrier" and "src" not in mirror and "dst" not in mirror


_signature_of = functools.lru_cache(maxsize=64)(inspect.signature)


def _hash(*parts: Any) -> int:
    return zlib.crc32(repr(parts).encode())


def group_key(group: dist.ProcessGroup) -> str:
    """Name of a process group that its ranks share."""
    # Private, torch 2.1 to 2.15: names are counted, or hashed from the ranks, on all ranks alike.
    return str(dist.distributed_c10d._world.pg_names.get(group, ""))


def group_of(key: str) -> dist.ProcessGroup:
    """The process group of that name."""
    for group, name in dist.distributed_c10d._world.pg_names.items():
        if name == key:
            return group
    raise RuntimeError(f"ddpfix: rank {dist.get_rank()} has no process group {key!r}, which another rank uses")


# -- taking part -----------------------------------------------------------------------


def _extreme(largest: bool) -> Callable[[torch.dtype], Any]:
    def value(dtype: torch.dtype) -> Any:
        if dtype is torch.bool:
            return largest
        if dtype.is_floating_point:
            return float("inf") if largest else float("-inf")
        return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min

    return value


def _all_bits(dtype: torch.dtype) -> Any:
    return True if dtype is torch.bool else torch.iinfo(dtype).max if torch.iinfo(dtype).min == 0 else -1


def _zero(dtype: torch.dtype) -> Any:
    return 0


#: ``torch.distributed.ReduceOp`` -> its neutral element for a dtype.
_NEUTRAL: Dict[str, Callable[[torch.dtype], Any]] = {
    "SUM": _zero,
    "AVG": _zero,
    "PRODUCT": lambda dtype: 1,
    "MIN": _extreme(largest=True),
    "MAX": _extreme(largest=False),
    "BAND": _all_bits,
    "BOR": _zero,
    "BXOR": _zero,
}


def take_part(mirror: Dict[str, Any], device: torch.device, kept: Any, where: str) -> None:
    """Take part in a collective of others, with nothing of this rank's own.

    Arguments:
        mirror: :attr:`Operation.mirror` of a rank that performs it.
        device: of this rank's models; used where the others have a tensor on such a device.
        kept: what this rank last sent from there, if it is the source of a broadcast.
        where: the place in the script, for the log.
    """
    name, group = mirror["name"], group_of(mirror["group"])
    function = getattr(dist.distributed_c10d, name)
    size, me = dist.get_world_size(group), dist.get_rank()
    kind = mirror.get("device")
    on = device if kind in (None, device.type) else torch.device(kind)
    numel = mirror.get("numel", 0)
    dtype = getattr(torch, mirror.get("dtype", "float32"))

    def filled(value: Any, number: int = numel) -> torch.Tensor:
        return torch.full((number,), value, dtype=dtype, device=on)

    def received() -> List[torch.Tensor]:
        return [filled(0) for _ in range(size)]

    def nothing() -> torch.Tensor:
        """What a gather gets from a rank that has nothing."""
        if numel == 1 and mirror.get("dst") != me:
            _say_once(name, where, "0")
        return filled(0)

    if "op" in mirror:
        neutral = _NEUTRAL[mirror["op"]](dtype)
        if mirror["op"] == "AVG":
            _say_once(name, where, "0, and the average still is over all ranks")
        op = getattr(dist.ReduceOp, mirror["op"])
        if name == "all_reduce":
            function(filled(neutral), op=op, group=group)
        elif name == "reduce":
            function(filled(neutral), dst=mirror["dst"], op=op, group=group)
        elif name == "reduce_scatter":
            function(filled(0), [filled(neutral) for _ in range(size)], op=op, group=group)
        else:
            function(filled(0), filled(neutral, size * numel), op=op, group=group)
    elif name == "barrier":
        function(group)  # any barrier meets any other: torch's have no tag
    elif name == "broadcast":
        value = filled(0)
        if kept is not None:
            value.copy_(kept.reshape(-1))
            _say_once(name, where, "what it last sent from there")
        function(value, src=mirror["src"], group=group)
    elif name == "broadcast_object_list":
        objects = [None] * mirror["number"]
        if kept is not None:
            objects = pickle.loads(kept)
            _say_once(name, where, "what it last sent from there")
        function(objects, src=mirror["src"], group=group, device=on if kind is not None else None)
    elif name == "all_gather":
        function(received(), nothing(), group=group)
    elif name == "gather":
        function(nothing(), received() if mirror["dst"] == me else None, dst=mirror["dst"], group=group)
    elif name == "gather_object":
        function(None, [None] * size if mirror["dst"] == me else None, dst=mirror["dst"], group=group)
    elif name == "scatter":
        function(filled(0), None, src=mirror["src"], group=group)
    elif name == "scatter_object_list":
        function([None], None, src=mirror["src"], group=group)
    else:  # all_gather_into_tensor and its other names
        function(filled(0, size * numel), nothing(), group=group)


@functools.lru_cache(maxsize=1024)  # once a place
def _say_once(name: str, where: str, what: str) -> None:
    logger.warning(
        "ddpfix: rank %d has run out of batches; to the %s that the others go on calling at %s it contributes %s",
        dist.get_rank(),
        name,
        where,
        what,
    )


class _Limited(io.BytesIO):
    """Takes so many bytes, and no more."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _KEPT_BYTES:
            raise OverflowError
        return super().write(data)


class Kept:
    """What this rank last sent in the broadcasts of its training loop, by place and signature."""

    def __init__(self) -> None:
        self._values: Dict[Tuple[int, int], Any] = {}

    def keep(self, site: int, signature: int, sent: Any) -> None:
        """Note what is about to be sent from a place in the script, if anything is."""
        key = (site, signature)
        if sent is None:
            return
        self._values.pop(key, None)
        if len(self._values) >= _KEPT_PLACES:
            del self._values[next(iter(self._values))]
        if isinstance(sent, torch.Tensor):
            if sent.numel() * sent.element_size() <= _KEPT_BYTES and sent.layout is torch.strided:
                self._values[key] = sent.detach().clone()
            return
        data = _Limited()
        try:
            pickle.dump(sent, data)
        except Exception:
            return  # too much; or torch itself says so, in a moment
        self._values[key] = data.getvalue()

    def get(self, site: int, signature: int) -> Any:
        """What was last sent from there, or ``None``."""
        return self._values.get((site, signature))

    def places(self) -> Tuple[Tuple[int, int], ...]:
        """Where something was sent from: site and signature."""
        return tuple(self._values)
