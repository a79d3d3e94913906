"""Making all ranks equal to one that has trained every step.

A rank that shadowed a backward did not run ``optimizer.step()``. Stock
``join()`` broadcasts parameters and buffers only, so Adam and momentum drift
apart with the very next step. Here the optimizers' state (moments, step counts,
``param_groups``), learning rate schedulers and gradient scalers come along.
"""

from __future__ import annotations

import logging
import pickle
import weakref
from contextlib import ExitStack
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Set, Tuple

import torch
import torch.distributed as dist
from torch.distributed.utils import _sync_module_states  # parameters and buffers, as DDP's constructor

from ._shadow import Shadow
from ._vote import inner

logger = logging.getLogger("ddpfix")

_warned: weakref.WeakSet[Any] = weakref.WeakSet()

_BUCKET_BYTES = 250 * 1024 * 1024  # DistributedDataParallel.broadcast_bucket_size


class Tracked:
    """The optimizers, schedulers and scalers of this process, oldest first, without keeping them alive."""

    def __init__(self) -> None:
        self._references: List[weakref.ref[Any]] = []

    def add(self, thing: Any) -> None:
        """Track one more."""
        if any(reference() is thing for reference in self._references):
            return
        self._references = [reference for reference in self._references if reference() is not None]
        self._references.append(weakref.ref(thing))

    def clear(self) -> None:
        """Forget all."""
        self._references.clear()

    def __iter__(self) -> Iterator[Any]:
        for reference in list(self._references):
            thing = reference()
            if thing is not None:
                yield thing


optimizers = Tracked()
schedulers = Tracked()
scalers = Tracked()


class _Slot(NamedTuple):
    """Stands for a tensor in a pickled state: where it is among those that travel, and what it is."""

    number: int
    shape: Tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


def catch_up(
    group: dist.ProcessGroup,
    source: int,
    shadows: Sequence[Shadow],
    begin_anew: Sequence[Shadow],
    on_device_only: bool,
) -> None:
    """Copy everything that training changes from one rank to all others.

    Arguments:
        group: the process group of the models.
        source: the rank in ``group`` to copy from.
        shadows: the models that every rank has.
        begin_anew: those whose reducer has to be made anew on all ranks.
        on_device_only: the group has no CPU backend, so that CPU tensors travel
            by way of the models' device.
    """
    with inner(), torch.no_grad():
        for shadow in begin_anew:
            shadow.make_reducer_anew()
        models = [shadow.get() for shadow in shadows]
        for ddp in models:
            assert ddp is not None
            with ExitStack() as versions:
                # A rank that is up to date may be between forward and backward: what it
                # receives is what it has, and must not count as a change in place.
                for tensor in (*ddp.module.parameters(), *ddp.module.buffers()):
                    if not tensor.is_inference():
                        versions.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
                _sync_module_states(
                    module=ddp.module,
                    process_group=group,
                    broadcast_bucket_size=_BUCKET_BYTES,
                    src=source,
                    params_and_buffers_to_ignore=ddp.parameters_to_ignore,
                    # Buffers that the user keeps rank-local stay so.
                    broadcast_buffers=ddp.broadcast_buffers,
                )
        if models:
            parameters = {
                id(parameter)
                for ddp in models
                for name, parameter in ddp.module.named_parameters()  # type: ignore[union-attr]
                if name not in ddp.parameters_to_ignore  # type: ignore[union-attr]
            }
            _copy_training_state(group, source, parameters, models[0].device, on_device_only)  # type: ignore[union-attr]


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether CPU tensors can be reduced on ``group`` (``ProcessGroup._get_backend``, torch 2.0 and up)."""
    try:
        group._get_backend(torch.device("cpu"))
    except Exception:
        return False
    return True


def _device_of_votes(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    return torch.device("cpu") if has_cpu_backend(group) else device


def _copy_training_state(
    group: dist.ProcessGroup, source: int, parameters: Set[int], device: torch.device, on_device_only: bool
) -> None:
    mine = [
        optimizer
        for optimizer in optimizers
        if any(id(p) in parameters for g in optimizer.param_groups for p in g["params"])
    ]
    their_schedulers = [s for s in schedulers if any(getattr(s, "optimizer", None) is o for o in mine)]
    am_source = dist.get_rank(group) == source
    tensors: List[torch.Tensor] = []
    package: Dict[str, Any] = {}
    if am_source:
        package = {
            "optimizers": [_pack(_state_of(optimizer, parameters), tensors) for optimizer in mine],
            "schedulers": [_pack(_picklable(s.state_dict()), tensors) for s in their_schedulers],
            "scalers": [_pack(_picklable(s.state_dict()), tensors) for s in scalers],
            "slots": [(tuple(t.shape), t.dtype, t.device.type == "cpu") for t in tensors],
        }
    received = _broadcast_pickled(package, group, source, _device_of_votes(group, device))
    travelling: List[torch.Tensor] = []
    for index, (shape, dtype, on_cpu) in enumerate(received["slots"]):
        where = device if on_device_only or not on_cpu else torch.device("cpu")
        if am_source:
            travelling.append(tensors[index].detach().contiguous().to(where))
        else:
            travelling.append(torch.empty(shape, dtype=dtype, device=where))
    if travelling:
        dist._broadcast_coalesced(group, travelling, _BUCKET_BYTES, source)
    if am_source:
        return
    for optimizer, state in zip(mine, received["optimizers"]):
        _warn_of_others(optimizer, parameters, dist.get_rank())
        _install(optimizer, state, travelling)
    for scheduler, state in zip(their_schedulers, received["schedulers"]):
        scheduler.load_state_dict({**scheduler.state_dict(), **_unpack(state, None, travelling)})
    for scaler, state in zip(scalers, received["scalers"]):
        if state:
            scaler.load_state_dict(_unpack(state, None, travelling))


def _warn_of_others(optimizer: Any, parameters: Set[int], rank: int) -> None:
    others = sum(id(p) not in parameters for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    if others and optimizer not in _warned:
        _warned.add(optimizer)
        logger.warning(
            "ddpfix: %s of rank %d also has %d parameters that belong to no DistributedDataParallel model of this process "
            "group. They are taken for the rank's own: this rank has not stepped them while it shadowed others. If ranks "
            "must keep them equal, put them into the model",
            type(optimizer).__name__,
            rank,
            others,
        )


def _broadcast_pickled(value: Any, group: dist.ProcessGroup, source: int, device: torch.device) -> Any:
    # Not broadcast_object_list: it needs numpy (torch 2.13, _tensor_to_object), which torch does not require.
    am_source = dist.get_rank(group) == source
    source = dist.get_global_rank(group, source)
    data = bytearray(pickle.dumps(value) if am_source else b"")
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=source, group=group)
    if not am_source:
        data = bytearray(int(length.item()))
    on_host = torch.frombuffer(data, dtype=torch.uint8)
    travelling = on_host.to(device)
    dist.broadcast(travelling, src=source, group=group)
    if am_source:
        return value
    on_host.copy_(travelling)
    return pickle.loads(data)


def _state_of(optimizer: Any, parameters: Set[int]) -> Dict[str, Any]:
    """The state by position instead of by parameter: parameters have no name that ranks share.

    ``None`` for a parameter that no DDP model of the process group keeps equal: it is the rank's own.
    """
    state: List[Any] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            has = parameter in optimizer.state
            state.append(None if id(parameter) not in parameters else dict(optimizer.state[parameter]) if has else {})
    other = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"state": state, "other": _picklable(other), "groups": [_picklable(g) for g in groups]}


def _install(optimizer: Any, packed: Dict[str, Any], tensors: List[torch.Tensor]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, packed_state in zip(parameters, packed["state"]):
        if packed_state is None:
            continue
        present = optimizer.state[parameter] if parameter in optimizer.state else {}
        state = {key: _unpack(value, present.get(key), tensors) for key, value in packed_state.items()}
        if state or present:
            optimizer.state[parameter] = state
    for key, value in packed["other"].items():
        optimizer.state[key] = _unpack(value, optimizer.state.get(key), tensors)
    for group, packed_group in zip(optimizer.param_groups, packed["groups"]):
        for key, value in packed_group.items():
            group[key] = _unpack(value, group.get(key), tensors)


def _pack(value: Any, tensors: List[torch.Tensor]) -> Any:
    """Replace each tensor in nested dicts, lists and tuples by a slot, and collect it."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            value = value.to_dense()
        tensors.append(value)
        return _Slot(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type == "cpu")
    if isinstance(value, dict):
        return {key: _pack(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_pack(item, tensors) for item in value)
    return value


def _unpack(value: Any, present: Any, tensors: List[torch.Tensor]) -> Any:
    """Put tensors back in place of slots, into the tensor that is there where it fits."""
    if isinstance(value, _Slot):
        tensor = tensors[value.number]
        if (
            isinstance(present, torch.Tensor)
            and present.shape == tensor.shape
            and present.dtype == tensor.dtype
            and present.layout is torch.strided
        ):
            # In place: a captured graph or a scheduler may hold this very tensor.
            present.copy_(tensor)
            return present
        return tensor.cpu() if value.on_cpu else tensor
    if isinstance(value, dict):
        there = present if isinstance(present, dict) else {}
        return {key: _unpack(item, there.get(key), tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        there_list = present if isinstance(present, (list, tuple)) and len(present) == len(value) else None
        return type(value)(
            _unpack(item, there_list[i] if there_list is not None else None, tensors)
            for i, item in enumerate(value)
        )
    return value


def _picklable(state: Dict[str, Any]) -> Dict[str, Any]:
    """Leave out what cannot travel (a lambda in a scheduler): each rank keeps its own."""
    kept = {}
    for key, value in state.items():
        try:
            pickle.dumps(value)
        except Exception:
            continue
        kept[key] = value
    return kept
