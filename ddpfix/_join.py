"""The ambient join: where the vote, the shadows and the loops meet torch.

Wraps, in place, methods of DistributedDataParallel, the collectives of
``torch.distributed``, ``Join``, and the constructors of optimizers, schedulers
and gradient scalers. There is no ``with``: every forward and backward of every
DDP model runs inside it.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import __version__, _catch_up, _collectives, _switches
from ._collectives import COLLECTIVES, Operation
from ._leave import AtExit, Departure
from ._leave import install as install_exit
from ._loop import Loops, call_site, install_iter, place
from ._loop import install as install_loops
from ._pairing import Call
from ._roll_call import RollCall
from ._shadow import NEEDED, NEEDED_OF_REDUCER, Shadow, why_not
from ._store import GroupStore
from ._vote import Collective, Forward, Rendezvous, inner, inside, timeout_of
from ._watch import Watch

if TYPE_CHECKING:
    from ._patches import Places

logger = logging.getLogger("ddpfix")

NAME = "join"

_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.distributed"


class _State:
    """What this process knows; made afresh in a forked child, which must not vote for its parent."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.meetings: Dict[Any, Tuple[Rendezvous, Departure]] = {}
        self.roll_calls: Dict[Any, Tuple[GroupStore, RollCall]] = {}
        self.watches: Dict[Any, Watch] = {}
        self.models: weakref.WeakKeyDictionary[Any, Tuple[Shadow, Rendezvous]] = (
            weakref.WeakKeyDictionary()
        )
        # Models that were not constructed while ddpfix looked on: copy.deepcopy, unpickled ones, those older than
        # ddpfix. They are numbered at the first place where all ranks have to meet for them.
        self.strangers: weakref.WeakKeyDictionary[Any, Shadow] = weakref.WeakKeyDictionary()
        self.sent = _collectives.Kept()
        # In the forward that runs: whether all ranks are known to be in it.
        self.all_in_forward = False
        self.in_training_forward = False
        self.loops = Loops(
            self._loop_ended, self._expects_training, self._had_nothing, self._may_have_batch, self._that_stop
        )
        self.at_exit = AtExit(self.leave_all, lambda: self.loops.thread)

    def _loop_ended(self, trained: Set[Rendezvous], where: str) -> None:
        # In the order in which all ranks have made them; not on the process groups of
        # other models: their ranks may be training, and this rank with them soon.
        for rendezvous, _ in self.live_meetings():
            if rendezvous in trained and (rendezvous.stops_together or _switches.current().loop_end):
                rendezvous.loop_end(where, self.loops.ended, _longest_timeout(rendezvous))

    def _may_have_batch(self, trains: Set[Rendezvous], where: str, left: Optional[int]) -> bool:
        # All are asked, so that all ranks make the same votes.
        answers = [
            rendezvous.next_batch(where, left, _longest_timeout(rendezvous))
            for rendezvous, _ in self.live_meetings()
            if rendezvous in trains
        ]
        return all(answers)

    def _that_stop(self, subjects: Set[Rendezvous]) -> Set[Rendezvous]:
        return {rendezvous for rendezvous in subjects if rendezvous.stops_together and rendezvous.live}

    def _had_nothing(self, models_of: Set[Rendezvous]) -> None:
        for rendezvous in models_of:
            rendezvous.may_be_needed()

    def _expects_training(self) -> Set[Rendezvous]:
        if not torch.is_grad_enabled():
            return set()
        return {
            rendezvous
            for ddp, (_, rendezvous) in list(self.models.items())
            # Not that of the wrapper: Lightning switches the module alone.
            if ddp.module.training and rendezvous.live
        }

    def live_meetings(self) -> List[Tuple[Rendezvous, Departure]]:
        if self.pid != os.getpid():
            return []
        return [meeting for meeting in self.meetings.values() if meeting[0].live]

    def leave_all(self) -> None:
        for _, departure in list(self.meetings.values()):
            departure.leave()

    def forget(self, group: Any) -> None:
        meeting = self.meetings.pop(group, None)
        if meeting is not None:
            meeting[0].close()
            for shadow in meeting[0].models.values():
                cast(Shadow, shadow).detach()
        watch = self.watches.pop(group, None)
        if watch is not None:
            watch.stop()
        self.roll_calls.pop(group, None)


_state = _State()


def _listening_loops() -> Optional[Loops]:
    return _state.loops if _state.meetings and _state.pid == os.getpid() else None


# -- models ----------------------------------------------------------------------


def _call_the_roll(group: dist.ProcessGroup) -> Tuple[GroupStore, RollCall]:
    """Leave word that this rank runs ddpfix, before the first model on a process group."""
    if group not in _state.roll_calls:
        switches = _switches.current()
        # What decides who votes, and on what.
        runs = {
            "ddpfix": __version__,
            "DDPFIX_LOOP_END": "1" if switches.loop_end else "0",
            "DDPFIX_UNEVEN": switches.uneven,
        }
        store = GroupStore(group)
        _state.roll_calls[group] = (
            store,
            RollCall(store, dist.get_rank(group), dist.get_world_size(group), runs),
        )
    return _state.roll_calls[group]


def _take_in(ddp: DistributedDataParallel, together: bool) -> None:
    """Number a newly constructed model among those of its process group.

    Arguments:
        ddp: the model.
        together: all ranks have been in its constructor just now.
    """
    group = ddp.process_group
    if dist.get_world_size(group) < 2:
        return
    shadow = _state.strangers.pop(ddp, None) or Shadow(ddp, _first_gradient)
    meeting = _state.meetings.get(group)
    if meeting is None:
        meeting = _state.meetings[group] = _open_meeting(group, ddp.device, together)
    rendezvous = meeting[0]
    reason = why_not(ddp)
    if reason is not None:
        # Its collectives would meet the votes of the others, so nobody votes on this group.
        rendezvous.dissolve(reason, logging.WARNING)
    shadow.number = rendezvous.add(shadow)
    _state.models[ddp] = (shadow, rendezvous)
    _state.loops.runs_here()
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in ddp.module.modules()):
        _communicates(rendezvous, "it has SyncBatchNorm layers")


def _open_meeting(group: dist.ProcessGroup, device: torch.device, together: bool) -> Tuple[Rendezvous, Departure]:
    on_device_only = not _catch_up.has_cpu_backend(group)

    def catch_up(source: int, models: Sequence[Any], begin_anew: Sequence[Any]) -> None:
        _catch_up.catch_up(group, source, models, begin_anew, on_device_only)

    def mirror(call: Call) -> None:
        assert call.mirror is not None
        sent = _state.sent.get(call.site, call.signature) if call.source == dist.get_rank() else None
        with inner():
            _collectives.take_part(call.mirror, device, sent, call.where)

    switches = _switches.current()
    rendezvous = Rendezvous(
        group,
        device if on_device_only else torch.device("cpu"),
        catch_up,
        mirror,
        _state.sent.places,
        lambda: _state.loops.passes,
    )
    usual = timeout_of(group, rendezvous.device) or 600.0
    patience = usual / 2 if switches.patience is None else switches.patience
    store, roll_call = _call_the_roll(group)
    difference = roll_call.difference(0.0 if together else min(usual / 2, 60.0))
    if difference is not None:
        text = f"the ranks do not run ddpfix alike: {difference}. Switch it on in the same way on all ranks"
        rendezvous.dissolve(text, logging.WARNING if roll_call.is_first else logging.INFO)
    elif switches.uneven == "stop":
        rendezvous.stops_together = True
    if switches.watch and rendezvous.live:
        _state.watches[group] = _watch_over(rendezvous, store)
    _trace_around_the_vote()
    _state.at_exit.arm()
    return rendezvous, Departure(rendezvous, store, patience)


def _communicates(rendezvous: Rendezvous, why: str) -> None:
    """Note that a model cannot be shadowed, as its ranks need each other within the forward or backward."""
    if not rendezvous.stops_together and rendezvous.live and _switches.current().uneven == "auto":
        rendezvous.stops_together = True
        rendezvous.why_together = f"a model that communicates in its forward or backward ({why}) cannot be shadowed (DDPFIX_UNEVEN)"
        logger.info(
            "ddpfix: rank %d: %s: from here on all ranks end their training loops with the first that runs out of batches",
            rendezvous.rank,
            rendezvous.why_together,
        )


def _longest_timeout(rendezvous: Rendezvous) -> float:
    """Seconds that no collective of the script waits longer than."""
    own = timeout_of(rendezvous.group, rendezvous.device) or 600.0
    # Private, torch 2.1 to 2.15: the process groups of this process. Without it, the votes wait as long as their own group's.
    groups = list(getattr(dist.distributed_c10d._world, "pg_map", ()))
    return max([own, *(_timeout(group) or 0.0 for group in groups)])


def _timeout(group: Any) -> Optional[float]:
    found = [timeout_of(group, torch.device(kind)) for kind in ("cpu", "cuda")]
    return max((timeout for timeout in found if timeout is not None), default=None)


def _watch_over(rendezvous: Rendezvous, store: GroupStore) -> Watch:
    rank = dist.get_rank()
    this = weakref.ref(rendezvous)  # the thread keeps no process group alive

    def waiting_since() -> Optional[float]:
        meeting = this()
        return meeting.waiting_since if meeting is not None else None

    def stands() -> str:
        meeting = this()
        if meeting is None:
            return f"rank {rank} has left"
        words = f"rank {rank} {meeting.last_vote()}"
        if meeting.waiting_since is None:
            frame = sys._current_frames().get(_state.loops.thread or 0)
            words += f", and is now at {place(frame)}"
        return words

    return Watch(store, rendezvous.rank, rendezvous.world_size, waiting_since, stands, _switches.current().watch)


def _first_gradient(shadow: Shadow, synchronised: bool) -> None:
    """A backward of this rank reaches the parameters of a model."""
    if _state.pid != os.getpid():
        return
    ddp = shadow.get()
    if ddp is None:
        return
    if ddp in _state.strangers and synchronised:
        _take_in(ddp, together=False)
    entry = _state.models.get(ddp)
    if entry is None:
        return
    rendezvous = entry[1]
    if shadow.device.type == "cpu":  # else it is a thread of the autograd engine
        _state.loops.runs_here()
    _state.loops.trained(rendezvous, synchronised)
    _state.at_exit.goes_on()
    rendezvous.open = True
    if not synchronised or not rendezvous.live or ddp._join_config.enable:
        return
    if shadow.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        rendezvous.dissolve("a CUDA graph captures the step; its replay cannot vote", logging.WARNING)
        return
    rendezvous.backward(shadow.number)


def _voter(ddp: DistributedDataParallel) -> Optional[Tuple[Shadow, Rendezvous]]:
    entry = _state.models.get(ddp)
    if entry is None or _state.pid != os.getpid():
        return None
    if not entry[1].live or ddp._join_config.enable:
        return None  # the user's own join() is at work
    return entry


def _meet_before_forward(ddp: DistributedDataParallel, after: bool = False) -> None:
    if ddp not in _state.models and torch.is_grad_enabled() and dist.get_world_size(ddp.process_group) > 1:
        if ddp not in _state.strangers:
            _state.strangers[ddp] = Shadow(ddp, _first_gradient)
        if _state.strangers[ddp].next_forward(ddp, True, after).buffers:
            _take_in(ddp, together=False)
    if not after:
        _state.all_in_forward = False
        _state.in_training_forward = torch.is_grad_enabled() and ddp.module.training
    entry = _voter(ddp)
    if entry is None:
        return
    shadow, rendezvous = entry
    shadow.source = 0
    if not after:
        if torch.is_grad_enabled() and ddp.module.training:
            _state.loops.runs_here()  # other threads may evaluate
        if not ddp._lazy_init_ran:
            # apply_optimizer_in_backward may have come after the constructor;
            # DDP looks for it in its first forward (_lazy_init).
            reason = why_not(ddp)
            if reason is not None:
                rendezvous.dissolve(reason, logging.WARNING)
                return

    def forward() -> Forward:
        fresh = not any(cast(Shadow, other).waits_for_backward for other in rendezvous.models.values())
        return shadow.next_forward(ddp, fresh, after)

    if forward().rebuild or forward().buffers:
        if torch.is_grad_enabled():
            # Stock raises here when the last backward has left a bucket unreduced (unused
            # parameters). Waiting for the others first would hide that: they wait for the bucket.
            ddp.reducer._check_reducer_finalized()
        shadow.source, all_in_it = rendezvous.forward(forward)
        _state.all_in_forward |= all_in_it


def _note_forward(ddp: DistributedDataParallel) -> None:
    entry = _state.models.get(ddp)
    shadow = entry[0] if entry is not None else _state.strangers.get(ddp)
    if shadow is not None:
        shadow.ran_forward(ddp)


def _nothing(ddp: DistributedDataParallel, after: bool = False) -> None:
    """Stands in for the two functions above until there is a model to vote for."""


_before_forward: Callable[..., None] = _nothing
_after_forward: Callable[..., None] = _nothing


def _trace_around_the_vote() -> None:
    """Keep torch.compile out of the vote, once there is one.

    Decorating imports torch._dynamo, which DDP's constructor has imported by then (torch 2.6 and up).
    """
    global _before_forward, _after_forward
    if _before_forward is _nothing:
        _before_forward = torch.compiler.disable(_meet_before_forward)
        _after_forward = torch.compiler.disable(_note_forward)


def _group_of_constructor(original: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[Any, bool]:
    """The process group that a DDP constructor call names, and whether it will communicate."""
    arguments = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    group = arguments.get("process_group")
    mesh = arguments.get("device_mesh")
    if group is None and mesh is not None:
        group = mesh.get_group(mesh_dim=0)
    return group if group is not None else dist.group.WORLD, bool(arguments.get("init_sync", True))


def _install_on_ddp(places: Places) -> None:
    missing = [name for name in NEEDED if not hasattr(DistributedDataParallel, name)]
    missing += [f"reducer.{name}" for name in NEEDED_OF_REDUCER if not hasattr(dist.Reducer, name)]
    if not hasattr(torch._C, "_current_graph_task_id"):
        missing.append("torch._C._current_graph_task_id")
    if missing:
        from ._patches import Unavailable

        raise Unavailable(f"DistributedDataParallel of torch {torch.__version__} has no {', '.join(missing)}")

    def around_init(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            together = False
            if not inside() and _state.pid == os.getpid():
                try:
                    group, together = _group_of_constructor(original, (self, *args), kwargs)
                    if group is not None and dist.get_world_size(group) > 1 and group not in _state.meetings:
                        _call_the_roll(group)
                except Exception:
                    group = None  # bad arguments: torch says so itself
                if group is not None and together and _state.meetings:
                    constructor = functools.partial(_collectives.unique, "the constructor of DistributedDataParallel")
                    _meet(group, sys._getframe(1), constructor, only=True)
            with inner():
                original(self, *args, **kwargs)
            if not inside():
                _take_in(self, together)

        return __init__

    def around_pre_forward(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            _before_forward(self)
            return original(self, *inputs, **kwargs)

        return _pre_forward

    def around_post_forward(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def _post_forward(self: Any, output: Any) -> Any:
            _before_forward(self, after=True)
            output = original(self, output)
            _after_forward(self)
            return output

        return _post_forward

    def around_sync_buffers(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def _sync_module_buffers(self: Any, authoritative_rank: int) -> Any:
            # Stock takes rank 0, which may have run out of batches and be behind.
            entry = _state.models.get(self)
            if entry is not None and entry[0].source:
                authoritative_rank = entry[0].source
            return original(self, authoritative_rank)

        return _sync_module_buffers

    for method, factory in (
        ("__init__", around_init),
        ("_pre_forward", around_pre_forward),
        ("_post_forward", around_post_forward),
        ("_sync_module_buffers", around_sync_buffers),
    ):
        places.wrap(_DDP, f"DistributedDataParallel.{method}", factory)


# -- collectives of the script -----------------------------------------------------


def _why_no_shadow() -> str:
    """Say why a rank without a batch cannot take part in what a model does in its forward, and what would help."""
    if _switches.current().uneven == "join":
        return "it is part of a model's forward and has a counterpart in the backward; without DDPFIX_UNEVEN=join the ranks end together"
    return (
        "it is part of a model's forward, which needs all ranks. Their training loops end together where each is a loop over a "
        "DataLoader that the training thread reads and that has trained before"
    )


def _concerned(group: Any, only: bool = False) -> List[Rendezvous]:
    """The meetings whose ranks all take part in a collective on ``group``.

    Arguments:
        group: the process group of the collective.
        only: that of ``group`` itself and no other.
    """
    meetings = _state.live_meetings()
    if not meetings or not _state.loops.on_training_thread:
        return []
    found = []
    members = None
    for rendezvous, _ in meetings:
        if group is not rendezvous.group:
            if only:
                continue
            if members is None:
                members = set(dist.get_process_group_ranks(group))
            if not members.issuperset(dist.get_process_group_ranks(rendezvous.group)):
                continue
        found.append(rendezvous)
    return found


def _meet(group: Any, frame: Any, describe: Callable[[], Operation], only: bool = False) -> None:
    """Vote on each process group of DDP models that lies within ``group``.

    Arguments:
        group: the process group of the collective.
        frame: the script's frame.
        describe: tells what it is.
        only: vote on ``group`` itself and no other.
    """
    if _in_backward():
        # The step as a whole was voted for.
        if _in_autograd_function(frame):
            _note_communication(group, frame)
        return
    in_forward = DistributedDataParallel._active_ddp_module is not None and _state.loops.on_training_thread
    of_model = in_forward and _of_model(frame)
    if of_model and _state.in_training_forward:
        _note_communication(group, frame)
        if _state.all_in_forward:
            return
    elif of_model:
        return
    concerned = _concerned(group, only)
    if not concerned:
        return
    operation = describe()
    if of_model:
        # The first one stands for all of this forward. It fits no collective of the script.
        _state.all_in_forward = True
        operation = operation._replace(mirror=None, why_not=_why_no_shadow(), sent=None, signature=operation.signature ^ 1)
    position = _state.loops.position(frame)
    if of_model:
        # Whoever is in a training forward is in a loop, whatever feeds it.
        position = position._replace(in_body=True)
    # What is kept of a vote must keep nothing of the script alive.
    site, where, frame_module = call_site(frame), place(frame), str(frame.f_globals.get("__name__"))
    sent, reduced = operation.sent, [operation.reduced]
    operation = operation._replace(sent=None, reduced=None)
    several = len(concerned) > 1

    def call() -> Call:
        mirror, reason = operation.mirror, operation.why_not
        if several:
            # A rank that mirrors it on behalf of one of them would be missing in the vote of the next.
            mirror, reason = None, "several process groups of DDP models lie within its process group"
        elif mirror is not None and reduced and _averages_models(frame_module, reduced[0]):
            mirror, reason = None, "parameters are averaged, and zeros would shrink them"
        return Call(
            name=operation.name,
            where=where,
            site=site,
            signature=operation.signature,
            mirror=mirror,
            barrier=mirror is not None and mirror["name"] == "barrier",
            alike=mirror is not None and _collectives.alike(mirror),
            group=operation.group,
            asynchronous=operation.asynchronous,
            in_loop=position.in_body,
            of_loop=position.of_loop,
            trains_on=position.trains_on,
            loops=position.loops,
            ran_dry=position.ran_dry,
            of_model=of_model,
            why_not=reason,
            reader=operation.reader,
            source=operation.source,
        )

    in_loop = True if position.loops else position.in_body
    of_loop = position.of_loop or position.last_one
    for rendezvous in concerned:
        rendezvous.collective(
            Collective(
                site,
                operation.signature,
                call,
                in_loop,
                of_loop,
                position.ended,
                # A vote on one group must not give up sooner than the call on another would.
                None if group is rendezvous.group else _timeout(group),
            )
        )
    reduced.clear()
    _state.sent.keep(site, operation.signature, sent)


def _averages_models(module: str, tensor: Optional[torch.Tensor]) -> bool:
    """Whether a reduction is of a model's parameters themselves (local SGD), by hand or by torch's averagers."""
    if module.startswith("torch.distributed.algorithms.model_averaging"):
        return True
    return tensor is not None and tensor.numel() > 0 and any(
        parameter.data_ptr() == tensor.data_ptr() for ddp in list(_state.models) for parameter in ddp.module.parameters()
    )


def _of_model(frame: types.FrameType) -> bool:
    """Whether a call in a model's forward is part of its computation, and not the script's own log.

    Those of torch's modules are (SyncBatchNorm), those that have a counterpart in the backward, and those made by the
    ``forward`` of a module that has parameters or buffers. Others are not: Lightning runs ``training_step``, with all
    that it logs, inside of DDP's forward, and a metric has neither.
    """
    if str(frame.f_globals.get("__name__")).startswith("torch.nn.") or _in_autograd_function(frame):
        return True
    if _switches.current().uneven == "join":
        return False  # the script's author says that it can be mirrored
    above: Optional[types.FrameType] = frame
    while above is not None and above.f_globals.get("__name__") != _DDP:
        code = above.f_code
        module = above.f_locals.get(code.co_varnames[0]) if code.co_name == "forward" and code.co_argcount else None
        if isinstance(module, torch.nn.Module) and any(
            next(iterator, None) is not None for iterator in (module.parameters(), module.buffers())
        ):
            return True
        above = above.f_back
    return False


def _in_autograd_function(frame: Optional[types.FrameType]) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_globals.get("__name__") == "torch.autograd.function":
            return True
        frame = frame.f_back
    return False


def _note_communication(group: Any, frame: types.FrameType) -> None:
    """Note that a model's ranks need each other within a step; on a part of its process group, too."""
    pending = [r for r, _ in _state.live_meetings() if not r.stops_together]
    if not pending or _switches.current().uneven != "auto":
        return
    members = set(dist.get_process_group_ranks(group))
    for rendezvous in pending:
        if len(members.intersection(dist.get_process_group_ranks(rendezvous.group))) > 1:
            _communicates(rendezvous, f"at {place(frame)}")


def _in_backward() -> bool:
    # Private, there since torch 2.0; without it comm hooks written in Python would vote.
    return bool(torch._C._current_graph_task_id() != -1)


def _coalescing() -> bool:
    """Whether collectives are only collected, to be started together (``_coalescing_manager``, torch 2.1 to 2.15)."""
    return bool(getattr(dist.distributed_c10d._world, "pg_coalesce_state", None))


def _install_on_collectives(places: Places) -> None:
    is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)

    def around(name: str) -> Callable[[Any], Any]:
        def factory(original: Any) -> Any:
            parameters = list(inspect.signature(original).parameters)
            position = parameters.index("group") if "group" in parameters else None

            @functools.wraps(original, updated=())
            def collective(*args: Any, **kwargs: Any) -> Any:
                # Traced by torch.compile, the stock function must be seen: dynamo
                # replaces it by identity with a functional collective.
                if is_compiling() or not _state.meetings or inside() or _coalescing():
                    return original(*args, **kwargs)
                group = kwargs.get("group")
                if group is None and position is not None and len(args) > position:
                    group = args[position]
                if group is None:
                    group = dist.group.WORLD
                assert group is not None
                if group is not dist.GroupMember.NON_GROUP_MEMBER and not (
                    name == "new_group" and kwargs.get("use_local_synchronization")
                ):
                    describe = functools.partial(_collectives.describe, name, original, args, kwargs, group)
                    _meet(group, sys._getframe(1), describe)
                with inner():
                    return original(*args, **kwargs)

            return collective

        return factory

    module = sys.modules[_C10D]
    for name in COLLECTIVES:
        if hasattr(module, name):
            places.wrap(_C10D, name, around(name), also=("torch.distributed",), rebind=True)

    def around_destroy(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def destroy_process_group(group: Any = None) -> None:
            world = group is None or group is dist.group.WORLD
            leaving = list(_state.meetings) if world else [g for g in _state.meetings if g is group]
            if _state.pid == os.getpid():
                for one in leaving:
                    # In a ``finally`` with an error in flight nobody is shadowed.
                    if not _state.at_exit.in_error:
                        _state.meetings[one][1].leave()
                    _state.forget(one)
            original(group)

        return destroy_process_group

    places.wrap(_C10D, "destroy_process_group", around_destroy, also=("torch.distributed",), rebind=True)


# -- the user's own join() -----------------------------------------------------------


def _install_on_join(places: Places) -> None:
    module = sys.modules["torch.distributed.algorithms.join"]
    disabled = module._JoinConfig.construct_disabled_join_config

    def meetings_of(join: Any) -> List[Rendezvous]:
        found = []
        for joinable in join._joinables:
            entry = _state.models.get(joinable) if isinstance(joinable, torch.nn.Module) else None
            if entry is not None and entry[1] not in found:
                found.append(entry[1])
        return found

    def around_enter(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def __enter__(self: Any) -> Any:
            if self._enable:
                for rendezvous in meetings_of(self):
                    _meet(rendezvous.group, sys._getframe(1), lambda: _collectives.unique("join()"), only=True)
                    rendezvous.suspended += 1
            return original(self)

        return __enter__

    def around_exit(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def __exit__(self: Any, *error: Any) -> Any:
            try:
                return original(self, *error)
            finally:
                if self._enable:
                    for rendezvous in meetings_of(self):
                        rendezvous.suspended = max(0, rendezvous.suspended - 1)
                    # Join.__init__ enables it and nothing in torch (2.1 to 2.15)
                    # ever disables it: each later forward, evaluation on one rank
                    # included, would go on waiting for all ranks.
                    for joinable in self._joinables:
                        joinable._join_config = disabled()

        return __exit__

    places.wrap("torch.distributed.algorithms.join", "Join.__enter__", around_enter)
    places.wrap("torch.distributed.algorithms.join", "Join.__exit__", around_exit)


# -- what catching up must know --------------------------------------------------------


def _install_trackers(places: Places) -> None:
    def tracker(tracked: _catch_up.Tracked) -> Callable[[Any], Any]:
        def around(original: Any) -> Any:
            @functools.wraps(original, updated=())
            def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                tracked.add(self)

            return __init__

        return around

    places.wrap("torch.optim.optimizer", "Optimizer.__init__", tracker(_catch_up.optimizers))
    places.wrap("torch.optim.lr_scheduler", "LRScheduler.__init__", tracker(_catch_up.schedulers))
    # torch.amp.GradScaler, the base of torch.cuda.amp's, from torch 2.3 on.
    scaler = "torch.amp.grad_scaler"
    if scaler not in sys.modules or not hasattr(sys.modules[scaler], "GradScaler"):
        scaler = "torch.cuda.amp.grad_scaler"
    places.wrap(scaler, "GradScaler.__init__", tracker(_catch_up.scalers))


def _take_in_what_exists() -> None:
    """Find what a script made before it imported ddpfix; its models are taken in at their next forward."""
    if not dist.is_initialized():
        return
    _trace_around_the_vote()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.optim.Optimizer):
            _catch_up.optimizers.add(thing)
        elif issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
            _catch_up.schedulers.add(thing)


def _watches_loops() -> bool:
    return _switches.current().loop_end or _switches.current().uneven == "stop"


# -- the patch -----------------------------------------------------------------------


def install(places: Places) -> None:
    """Place everything; called by :mod:`ddpfix._patches` once torch is imported."""
    if not dist.is_available():
        return
    _install_on_ddp(places)
    _install_on_collectives(places)
    _install_on_join(places)
    _install_trackers(places)
    install_exit(places, lambda: _state.at_exit)
    if _watches_loops():
        install_loops(places, _listening_loops)
    _take_in_what_exists()


def _install_on_torchdata(places: Places) -> None:
    # StatefulDataLoader defines __iter__ anew; its iterators inherit __next__.
    if _watches_loops():
        install_iter(
            places,
            _listening_loops,
            "torchdata.stateful_dataloader.stateful_dataloader",
            "StatefulDataLoader",
        )


LATER = {"torchdata.stateful_dataloader.stateful_dataloader": _install_on_torchdata}


def uninstall() -> None:
    """Forget every model and process group; called after the places were taken off."""
    global _state, _before_forward, _after_forward
    _state.at_exit.disarm()
    for group in list(_state.meetings):
        _state.forget(group)
    for shadow in _state.strangers.values():
        shadow.detach()
    for tracked in (_catch_up.optimizers, _catch_up.schedulers, _catch_up.scalers):
        tracked.clear()
    _before_forward = _after_forward = _nothing
    _state = _State()


def status() -> Dict[str, Any]:
    """What the ambient join has done so far in this process, for :func:`ddpfix.status`."""
    return {
        "process_groups": [
            {
                "ranks": dist.get_process_group_ranks(rendezvous.group),
                "votes": rendezvous.votes,
                "models": [
                    {"steps_trained": rendezvous.trained[number], "steps_shadowed": rendezvous.shadowed[number]}
                    for number in rendezvous.models
                ],
                "steps_trained": rendezvous.steps_trained,
                "steps_shadowed": rendezvous.steps_shadowed,
                "seconds_shadowing": round(rendezvous.seconds_waited, 3),
                "off": rendezvous.dissolved,
            }
            for rendezvous, _ in _state.meetings.values()
        ]
    }


def _forget_in_child() -> None:
    """A forked child (a DataLoader worker, say) is no rank: it must neither vote nor shadow."""
    global _state
    _state = _State()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
