"""The GPU on which an NCCL barrier meets.

An NCCL barrier is an all-reduce of one element, so it needs a GPU. Up to torch 2.14 ``ProcessGroupNCCL`` never asks which one is
current: where the script names none, it takes one that the process group has used, else *rank modulo number of GPUs*. If that is not
the GPU of the collectives that follow, the first barrier opens a communicator of its own, and the job hangs, or two ranks meet on one
GPU. From 2.15 on ``ProcessGroupNCCL2`` makes the same guess when the process group is made, and cannot be told better afterwards.

:func:`choose_device` replaces the guess where the process has shown which GPU it means. It is handed plain values and knows nothing of
torch. Everything else here finds these values, or hands the answer to torch. In any doubt torch gets the very arguments of the caller.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch

from ddpfix._patches import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpfix._patches import Places

NAME = "barrier"

_log = logging.getLogger("ddpfix")

# Names of torch that are not public, each of them here only. The backends are told apart by the names of their classes, because most
# builds lack most of these classes.
_C10D = "torch.distributed.distributed_c10d"
_LEGACY = "ProcessGroupNCCL"
_NCCL2 = ("ProcessGroupNCCL2", "ProcessGroupNCCLLazy")  # bound to one GPU for good when they are made (2.14 on request, 2.15)
_DEBUG_WRAPPER = "_ProcessGroupWrapper"  # stands before the backend under TORCH_DISTRIBUTED_DEBUG=DETAIL

_cuda: Any = torch.cuda  # partly without annotations


class Facts(NamedTuple):
    """What :func:`choose_device` decides on. The defaults mean that nothing is known, hence that torch is left alone.

    Arguments:
        device_ids_given (bool): the caller of the barrier has named a GPU. ``device_ids=None`` names none (DeepSpeed passes it).
        nccl_on_cuda_only (bool): CUDA is the only device type of the process group, and NCCL its backend.
        nccl2 (bool): the backend binds its GPU when it is made.
        being_made (bool): this is that moment; no barrier is called.
        cuda_initialized (bool): as ``torch.cuda.is_initialized()``, which is ``False`` in a forked child that cannot use CUDA.
        used (bool): the process group has a communicator, hence a GPU.
        bound (int, optional): the GPU given as ``device_id`` to ``init_process_group``.
        current (int, optional): the current CUDA device of this thread.
        chosen (int, optional): the last GPU that this thread has made current with ``set_device``.
        local_rank (int, optional): ``LOCAL_RANK``, if it was set for this very rank.
        device_count (int): number of visible GPUs.
        contexts (frozenset of int, optional): GPUs on which this process has a primary context; ``None`` if that cannot be told.
    """

    device_ids_given: bool = False
    nccl_on_cuda_only: bool = False
    nccl2: bool = False
    being_made: bool = False
    cuda_initialized: bool = False
    used: bool = True
    bound: Optional[int] = None
    current: Optional[int] = None
    chosen: Optional[int] = None
    local_rank: Optional[int] = None
    device_count: int = 0
    contexts: Optional[frozenset[int]] = None


def choose_device(facts: Facts) -> Optional[int]:
    """Tells on which GPU a process group should meet.

    Arguments:
        facts (Facts): the signals.

    Returns:
        int, optional: index of the GPU; ``None``: leave the choice to torch.
    """
    if facts.device_ids_given or not facts.nccl_on_cuda_only or not facts.cuda_initialized:
        return None
    if facts.nccl2 and not facts.being_made:
        return None  # its barrier ignores device_ids
    if facts.used:
        # torch stays on the GPU that was used. Another one would be a second communicator, which all ranks have to open together.
        return None
    if facts.device_count < 2:
        return None  # one visible GPU: torch cannot guess wrong
    if facts.bound is not None:
        # torch takes it as well (2.3 on), unless TORCH_DISTRIBUTED_DEBUG=DETAIL hides it (pytorch#178977)
        return facts.bound if 0 <= facts.bound < facts.device_count else None
    if facts.current is None or not 0 <= facts.current < facts.device_count:
        return None
    if facts.chosen is not None and facts.chosen != facts.current:
        return None  # a `with torch.cuda.device(...)` block around this call, or the caller is back from one
    if facts.current != 0:
        # Nobody is on a GPU other than 0 by default. Yet where it is neither recorded nor the local rank (all of training inside
        # `with torch.cuda.device(gpus[rank])`), a peer in the same position on GPU 0 looks as if it had chosen nothing and meets
        # where torch guesses. That may be this very GPU, if the GPUs are dealt out in another order than the ranks. Without a
        # LOCAL_RANK (mp.spawn) the order cannot be seen; then the current device stands.
        if facts.chosen is None and facts.local_rank not in (None, facts.current):
            return None
        return facts.current
    # GPU 0 is where everybody is by default, so a choice has to be shown.
    if facts.contexts and 0 not in facts.contexts:
        return None  # the process works elsewhere; whoever made GPU 0 current has only put back what was before
    if facts.chosen == 0 or facts.local_rank == 0:
        return 0
    # That the process has touched GPU 0 and no other shows nothing: one smoke test, one pinned buffer before `.to(f"cuda:{rank}")`
    # does that on every rank, and all of them would meet on GPU 0 where torch guesses right.
    return None


# ---- the signals of a live process -------------------------------------------------------------------------------------------------


def facts_of(group: Any, device_ids: Any = None) -> Facts:
    """Gathers the signals for a barrier of a process group; never initialises CUDA. May raise what torch raises."""
    if device_ids is not None:
        return Facts(device_ids_given=True)
    # First of all, for what follows may initialise CUDA or fail without it: on a CPU build, in a gloo job, in a forked child.
    if not _cuda.is_initialized():
        return Facts()
    c10d = torch.distributed.distributed_c10d
    if group is None:
        group = c10d._get_default_group()
    backend = _bare(group._get_backend(torch.device("cuda")))
    # With gloo beside NCCL ("cpu:gloo,cuda:nccl", or no backend named) the barrier is gloo's since 2.1, and device_ids would turn it
    # into one of NCCL from 2.7.1 on.
    nccl_on_cuda_only = {device.type for device in group._device_types} == {"cuda"} and type(backend).__name__ in (_LEGACY, *_NCCL2)
    gates = Facts(nccl_on_cuda_only=nccl_on_cuda_only, nccl2=type(backend).__name__ in _NCCL2, cuda_initialized=True)
    if not nccl_on_cuda_only or _has_communicator(group, backend):
        return gates
    return _with_position(gates._replace(used=False, bound=_bound(group)), c10d.get_rank())


def facts_of_new_group(opts: Any) -> Facts:
    """As :func:`facts_of`, when ``ProcessGroupNCCL2`` is about to be made."""
    if not _cuda.is_initialized():
        return Facts()
    # A reconfigurable group binds no GPU at all here. Without a group object there is nowhere to keep the answer.
    if opts.enable_reconfigure or opts.process_group is None or opts.process_group.bound_device_id is not None:
        return Facts()
    ranks = opts.global_ranks_in_group  # empty for the default group
    gates = Facts(nccl_on_cuda_only=True, nccl2=True, being_made=True, cuda_initialized=True, used=False)
    return _with_position(gates, ranks[opts.group_rank] if ranks else opts.group_rank)


def _bare(backend: Any) -> Any:
    while type(backend).__name__ == _DEBUG_WRAPPER:
        backend = backend.wrapped_pg
    return backend


def _has_communicator(group: Any, backend: Any) -> bool:
    # Counts the collectives, from 0 for NCCL since torch 2.0. A send or receive opens a communicator too and is not counted.
    if group._get_sequence_number_for_group() > 0:
        return True
    initialized = getattr(backend, "_is_initialized", None)  # 2.5 or 2.6 on
    return initialized is not None and bool(initialized())


def _bound(group: Any) -> Optional[int]:
    device = getattr(group, "bound_device_id", None)  # 2.3 on
    if device is None:
        return None
    # -1 is no GPU: bound, but to nothing that could be passed on
    return int(device.index) if device.type == "cuda" and device.index is not None else -1


def _with_position(gates: Facts, rank: int) -> Facts:
    device_count = _cuda.device_count()
    return gates._replace(
        current=_cuda.current_device(),
        chosen=_chosen_here(),
        local_rank=_local_rank(rank),
        device_count=device_count,
        contexts=_contexts(device_count),
    )


def _local_rank(rank: int) -> Optional[int]:
    # Children of mp.spawn inherit the environment of their parent, and some clusters preset LOCAL_RANK=0 for every process. What was
    # set for this very process by a launcher has the right RANK beside it.
    try:
        return int(os.environ["LOCAL_RANK"]) if int(os.environ["RANK"]) == rank else None
    except (KeyError, ValueError):
        return None


def _contexts(device_count: int) -> Optional[frozenset[int]]:
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # creates none
    return None if has_context is None else frozenset(index for index in range(device_count) if has_context(index))


# ---- what set_device was last called with ------------------------------------------------------------------------------------------


# Per thread, as the current device itself is. The thread with which a DataLoader pins memory makes current whatever was current where
# its iterator was made, so that GPU 0 would look chosen on ranks that never chose.
_chosen = threading.local()


def _forget() -> None:
    global _chosen
    _chosen = threading.local()


# A forked child has not chosen what its parent chose.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _chosen_here() -> Optional[int]:
    index: Optional[int] = getattr(_chosen, "index", None)
    return index


def _record(device: Any) -> None:
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        device = device.index if device.type == "cuda" else None
    elif isinstance(device, torch.cuda.device):
        device = device.idx
    if not isinstance(device, int):
        _chosen.index = None  # torch understands it and this function does not
    elif device >= 0:  # torch does nothing for a negative one
        _chosen.index = device


def _recording(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def set_device(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)  # raises for what it does not accept
        try:
            _record(args[0] if args else kwargs["device"])
        except Exception:
            _log.debug("set_device was not recorded", exc_info=True)
        return result

    return set_device


# ---- what is placed in torch -------------------------------------------------------------------------------------------------------


_placed = False  # a closure that somebody has kept must do what torch does once the patch is off


def _device_for(gather: Callable[..., Facts], *args: Any) -> Optional[int]:
    if not _placed:
        return None
    try:
        index = choose_device(gather(*args))
    except Exception:
        # also where the arguments are wrong or nothing is initialised: torch says so in its own words
        _log.debug("the choice of a GPU is left to torch", exc_info=True)
        return None
    if index is not None:
        _log.debug("NCCL is told to meet on cuda:%d", index)
    return index


def _barrier_on_device(original: Callable[..., Any]) -> Callable[..., Any]:
    # The order has been the same since 1.8; other parameters have been added behind.
    parameters = list(inspect.signature(original).parameters)
    if parameters[:3] != ["group", "async_op", "device_ids"]:
        raise Unavailable(f"barrier takes ({', '.join(parameters)}), not (group, async_op, device_ids, ...)")

    @functools.wraps(original, updated=())
    def barrier(*args: Any, **kwargs: Any) -> Any:
        group = args[0] if args else kwargs.get("group")
        device_ids = args[2] if len(args) > 2 else kwargs.get("device_ids")
        index = _device_for(facts_of, group, device_ids)
        if index is None:
            return original(*args, **kwargs)
        if len(args) > 2:
            return original(*args[:2], [index], *args[3:], **kwargs)
        return original(*args, **{**kwargs, "device_ids": [index]})

    return barrier


def _group_barrier_on_device(original: Callable[..., Any]) -> Callable[..., Any]:
    options_class = torch.distributed.distributed_c10d.BarrierOptions

    # The name and `self` must stay: a barrier of a Python subclass of ProcessGroup goes through C++ back to "the Python override",
    # which this closure looks like. pybind11 ends that circle only if the calling frame is a function `barrier` with the group as its
    # first argument; under another name it recurses for ever.
    @functools.wraps(original, updated=())
    def barrier(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Options come from torch.distributed.barrier, which has decided already, or from a caller who knows.
        index = None if args or kwargs else _device_for(facts_of, self)
        if index is None:
            return original(self, *args, **kwargs)
        options = options_class()
        options.device_ids = [index]
        # The tensor by which torch finds the backend; unset, it lands on the CPU or on GPU 0.
        options.device = torch.device("cuda", index)
        return original(self, options)

    return barrier


def _bind_to_device(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def _nccl2_device(*args: Any, **kwargs: Any) -> Any:
        opts: Any = args[0] if args else kwargs.get("opts")
        index = _device_for(facts_of_new_group, opts)
        if index is not None:
            # torch stores its own guess here too, and a group that is bound already is not guessed for
            opts.process_group.bound_device_id = torch.device("cuda", index)
        return original(*args, **kwargs)

    return _nccl2_device


_OPTIONAL = (
    ("torch.cuda", "set_device", _recording),
    ("torch.accelerator", "set_device_index", _recording),  # 2.6 on
    (_C10D, "ProcessGroup.barrier", _group_barrier_on_device),
    (_C10D, "_nccl2_device", _bind_to_device),  # 2.14 or 2.15 on
)


def install(places: Places) -> None:
    """Places the barrier patch.

    Arguments:
        places (Places): records what is placed.

    Raises:
        Unavailable: this torch has no ``barrier``, or one with other parameters.
    """
    global _placed
    # One function under two names, and torch itself uses both.
    places.wrap(_C10D, "barrier", _barrier_on_device, also=["torch.distributed"], rebind=True)
    for module, attribute, factory in _OPTIONAL:
        try:
            places.wrap(module, attribute, factory)
        except (Unavailable, AttributeError) as error:
            _log.debug("the patch barrier does without %s.%s: %s", module, attribute, error)
    _placed = True


def _skip_this_file(places: Places) -> None:
    """Has torch.compile treat this file as it treats torch's own barrier and set_device, which it never looks into.

    What is decided here must be decided anew at each call, and the compiler of torch 2.1 has errors of its own on this code. The call
    of a function that is skipped is the one graph break that the call of a barrier is anyway.
    """
    for module_name in LATER:
        add = getattr(sys.modules.get(module_name), "add", None)
        if add is not None and module_name not in _skipped_by:
            _skipped_by.add(module_name)
            add(__name__)


_skipped_by: set[str] = set()  # for good: what is not placed is not called

# Two names of one list: the first up to 2.2, the second from 2.3 on. Neither is imported before torch.compile is used.
LATER: dict[str, Callable[[Places], None]] = {
    "torch._dynamo.skipfiles": _skip_this_file,
    "torch._dynamo.trace_rules": _skip_this_file,
}


def uninstall() -> None:
    """Forgets what was recorded: what the script chooses from now on is not seen."""
    global _placed
    _placed = False
    _forget()
