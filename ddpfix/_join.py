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
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set, Tuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _catch_up, _collectives, _switches
from ._collectives import COLLECTIVES, Operation
from ._leave import AtExit, Departure, in_error
from ._loop import Loops, call_site, install_iter, place
from ._loop import install as install_loops
from ._pairing import Call
from ._shadow import NEEDED, NEEDED_OF_REDUCER, Shadow, why_not
from ._store import GroupStore
from ._vote import Collective, Forward, Rendezvous, inner, inside
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
        self.watches: Dict[Any, Watch] = {}
        self.models: weakref.WeakKeyDictionary[Any, Tuple[Shadow, Rendezvous]] = (
            weakref.WeakKeyDictionary()
        )
        self.shadows: Dict[Any, List[Shadow]] = {}
        self.sent = _collectives.Kept()
        self.loops = Loops(self._loop_ended, self._expects_training, self._had_nothing)
        self.at_exit = AtExit(self.leave_all)

    def _loop_ended(self, trained: Set[Rendezvous], where: str) -> None:
        # In the order in which all ranks have made them; not on the process groups of
        # other models: their ranks may be training, and this rank with them soon.
        for rendezvous, _ in self.live_meetings():
            if rendezvous in trained:
                rendezvous.loop_end(where, self.loops.ended)

    def _had_nothing(self, models_of: Set[Rendezvous]) -> None:
        for rendezvous in models_of:
            rendezvous.may_be_needed()

    def _expects_training(self) -> Set[Rendezvous]:
        if not torch.is_grad_enabled():
            return set()
        return {
            rendezvous
            for ddp, (_, rendezvous) in list(self.models.items())
            if ddp.training and rendezvous.live
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
        watch = self.watches.pop(group, None)
        if watch is not None:
            watch.stop()
        for shadow in self.shadows.pop(group, []):
            shadow.detach()


_state = _State()


def _listening_loops() -> Optional[Loops]:
    return _state.loops if _state.meetings and _state.pid == os.getpid() else None


# -- models ----------------------------------------------------------------------


def _take_in(ddp: DistributedDataParallel) -> None:
    """Number a newly constructed model among those of its process group."""
    group = ddp.process_group
    if dist.get_world_size(group) < 2:
        return
    shadow = Shadow(ddp, _first_gradient)
    meeting = _state.meetings.get(group)
    if meeting is None:
        shadows: List[Shadow] = []
        on_device_only = not _catch_up.has_cpu_backend(group)

        def catch_up(source: int, models: int) -> None:
            _catch_up.catch_up(group, source, shadows[:models], on_device_only)

        device = ddp.device

        def mirror(call: Call) -> None:
            assert call.mirror is not None
            sent = _state.sent.get(call.site, call.signature) if call.source == dist.get_rank() else None
            with inner():
                _collectives.take_part(call.mirror, device, sent, call.where)

        rendezvous = Rendezvous(
            group,
            device if on_device_only else torch.device("cpu"),
            catch_up,
            mirror,
            _state.sent.places,
        )
        store = GroupStore(group)
        meeting = _state.meetings[group] = (rendezvous, Departure(rendezvous, store))
        if _switches.current().watch:
            _state.watches[group] = _watch_over(rendezvous, store)
        _state.shadows[group] = shadows
        _trace_around_the_vote()
        _state.at_exit.arm()
    rendezvous = meeting[0]
    reason = why_not(ddp)
    if reason is not None:
        # Its collectives would meet the votes of the others, so nobody votes on this group.
        rendezvous.dissolve(reason, logging.WARNING)
    shadow.number = len(rendezvous.models)
    _state.shadows[group].append(shadow)
    rendezvous.add(shadow)
    _state.models[ddp] = (shadow, rendezvous)
    _state.loops.runs_here()


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
    entry = _state.models.get(ddp) if ddp is not None else None
    if entry is None or ddp is None:
        return
    rendezvous = entry[1]
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
    if ddp not in _state.models and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
        # Not constructed while ddpfix looked on: a copy.deepcopy, an unpickled one, or one
        # older than ddpfix. All ranks begin to train it at this place, so it is numbered here.
        _take_in(ddp)
    entry = _voter(ddp)
    if entry is None:
        return
    shadow, rendezvous = entry
    shadow.source = 0
    if not after:
        _state.loops.runs_here()
        if not ddp._lazy_init_ran:
            # apply_optimizer_in_backward may have come after the constructor;
            # DDP looks for it in its first forward (_lazy_init).
            reason = why_not(ddp)
            if reason is not None:
                rendezvous.dissolve(reason, logging.WARNING)
                return

    def forward() -> Forward:
        fresh = not any(other.waits_for_backward for other in _state.shadows[rendezvous.group])
        return shadow.next_forward(ddp, fresh, after)

    if forward().rebuild or forward().buffers:
        if torch.is_grad_enabled():
            # Stock raises here when the last backward has left a bucket unreduced (unused
            # parameters). Waiting for the others first would hide that: they wait for the bucket.
            ddp.reducer._check_reducer_finalized()
        shadow.source = rendezvous.forward(forward)


def _note_forward(ddp: DistributedDataParallel) -> None:
    entry = _state.models.get(ddp)
    if entry is not None:
        entry[0].ran_forward(ddp)


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


def _group_of_constructor(original: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """The process group that a DDP constructor call names, or ``None`` if it will not communicate."""
    arguments = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    if not arguments.get("init_sync", True):
        return None
    group = arguments.get("process_group")
    mesh = arguments.get("device_mesh")
    if group is None and mesh is not None:
        group = mesh.get_group(mesh_dim=0)
    return group if group is not None else dist.group.WORLD


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
            if not inside() and _state.meetings:
                try:
                    group = _group_of_constructor(original, (self, *args), kwargs)
                except Exception:
                    group = None  # bad arguments: torch says so itself
                if group is not None:
                    constructor = functools.partial(_collectives.unique, "the constructor of DistributedDataParallel")
                    _meet(group, sys._getframe(1), constructor, only=True)
            with inner():
                original(self, *args, **kwargs)
            if not inside():
                _take_in(self)

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


def _concerned(group: Any, frame: types.FrameType, only: bool = False) -> List[Rendezvous]:
    """The meetings whose ranks all take part in a collective on ``group``.

    Arguments:
        group: the process group of the collective.
        frame: the caller's.
        only: that of ``group`` itself and no other.
    """
    meetings = _state.live_meetings()
    if not meetings or not _state.loops.on_training_thread:
        return []
    if _in_backward():
        return []  # the step as a whole was voted for
    if DistributedDataParallel._active_ddp_module is not None and _of_model(frame):
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
    concerned = _concerned(group, frame, only)
    if not concerned:
        return
    operation = describe()
    position = _state.loops.position(frame)
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
            why_not=reason,
            reader=operation.reader,
            source=operation.source,
        )

    in_loop = True if position.loops else position.in_body
    for rendezvous in concerned:
        rendezvous.collective(
            Collective(
                site, operation.signature, call, in_loop, position.of_loop or position.last_one, position.ended
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


def _of_model(frame: Optional[types.FrameType]) -> bool:
    """Whether a call in a model's forward is part of its computation, and not the script's own statistics.

    Those of torch's modules are (SyncBatchNorm), and those that have a counterpart in the backward. Lightning runs
    ``training_step``, with all that it logs, inside of DDP's forward.
    """
    assert frame is not None
    if str(frame.f_globals.get("__name__")).startswith("torch."):
        return True
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_globals.get("__name__") == "torch.autograd.function":
            return True
        frame = frame.f_back
    return False


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
                    if not in_error():
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


# -- the patch -----------------------------------------------------------------------


def install(places: Places) -> None:
    """Place everything; called by :mod:`ddpfix._patches` once torch is imported."""
    if not dist.is_available():
        return
    _install_on_ddp(places)
    _install_on_collectives(places)
    _install_on_join(places)
    _install_trackers(places)
    _state.at_exit.install(places)
    if _switches.current().loop_end:
        install_loops(places, _listening_loops)
    _take_in_what_exists()


def _install_on_torchdata(places: Places) -> None:
    # StatefulDataLoader defines __iter__ anew; its iterators inherit __next__.
    if _switches.current().loop_end:
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
                    {"steps_trained": trained, "steps_shadowed": shadowed}
                    for trained, shadowed in zip(rendezvous.trained, rendezvous.shadowed)
                ],
                "steps_trained": sum(rendezvous.trained),
                "steps_shadowed": sum(rendezvous.shadowed),
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
