"""The GPU of a barrier: the choice as a table, the signals of a stand-in for an NCCL group, and stock's own barrier behind both.

There need be no GPU: the values that torch.cuda would report are set by the fixture ``cuda``, and the barrier that answers is torch's own.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import os
import pickle
import sys
import threading
import types
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, Iterator

import pytest
from interpreters import environment, python, write

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.distributed_c10d as c10d  # noqa: E402

import ddpfix  # noqa: E402
from ddpfix import _barrier  # noqa: E402
from ddpfix._barrier import Facts, choose_device  # noqa: E402
from ddpfix._patches import Places, Unavailable  # noqa: E402

# ---- the choice


def fresh(**changes: Any) -> Facts:
    """An NCCL group without a communicator, in a process on the first of four GPUs that has done nothing yet."""
    facts = Facts(
        nccl_on_cuda_only=True, cuda_initialized=True, used=False, current=0, device_count=4, contexts=frozenset()
    )
    return facts._replace(**changes)


def nccl2(**changes: Any) -> Facts:
    return fresh(nccl2=True, being_made=True, **changes)


STOCK = None

DANGERS = {
    # rank 1 of `.to(f"cuda:{rank}")` without set_device: everybody is on GPU 0 by default
    "no set_device, barrier before any collective": (fresh(), STOCK),
    "no set_device, barrier first, torchrun": (fresh(local_rank=1), STOCK),
    "no set_device, barrier first, model moved": (fresh(contexts=frozenset({1})), STOCK),
    "no set_device, barrier first, model moved, rank 0 of mp.spawn": (fresh(contexts=frozenset({0})), STOCK),
    "no set_device, barrier after the DDP constructor": (fresh(used=True, local_rank=0, contexts=frozenset({0})), STOCK),
    "init_process_group(device_id=), no set_device": (fresh(bound=3), 3),
    "init_process_group(device_id=), set_device elsewhere": (fresh(bound=3, current=1, chosen=1), 3),
    "init_process_group(device_id=) of no GPU": (fresh(bound=-1, current=1, chosen=1), STOCK),
    "CUDA_VISIBLE_DEVICES, one GPU per process": (fresh(device_count=1, chosen=0, local_rank=3), STOCK),
    "CUDA_VISIBLE_DEVICES isolates, device_ids=[LOCAL_RANK] given": (
        fresh(device_ids_given=True, device_count=1, local_rank=3),
        STOCK,
    ),
    "device_ids given": (fresh(device_ids_given=True, current=2, chosen=2), STOCK),
    "2 nodes, 2 of 4 GPUs each, set_device(0)": (fresh(chosen=0), 0),
    "2 nodes, 2 of 4 GPUs each, set_device(0), torchrun": (fresh(chosen=0, local_rank=0), 0),
    "2 nodes, 2 of 4 GPUs each, set_device(1)": (fresh(current=1, chosen=1, local_rank=1), 1),
    "2 nodes, 2 of 4 GPUs each, LOCAL_RANK=0": (fresh(local_rank=0), 0),
    "2 nodes, 2 of 4 GPUs each, LOCAL_RANK=0, model moved": (fresh(local_rank=0, contexts=frozenset({0})), 0),
    "gpus=[3,0], rank 0": (fresh(current=3, chosen=3, local_rank=0), 3),
    "gpus=[3,0], rank 1": (fresh(chosen=0, local_rank=1), 0),
    "gloo group on a GPU box": (fresh(nccl_on_cuda_only=False, current=1, chosen=1), STOCK),
    "cpu:gloo,cuda:nccl": (fresh(nccl_on_cuda_only=False, chosen=0, bound=1), STOCK),
    "CPU-only build": (fresh(cuda_initialized=False, current=None, device_count=0, contexts=None), STOCK),
    "forked child of a parent that has used CUDA": (fresh(cuda_initialized=False, current=1), STOCK),
    "CUDA not initialised": (fresh(cuda_initialized=False, local_rank=0), STOCK),
    "new_group, first operation is a barrier": (fresh(current=2, chosen=2), 2),
    "DeviceMesh has called set_device": (fresh(current=1, chosen=1), 1),
    "with torch.cuda.device(k), group in use": (fresh(used=True, current=2), STOCK),
    "with torch.cuda.device(k), group fresh, set_device elsewhere": (fresh(current=2, chosen=1), STOCK),
    "with torch.cuda.device(0), group fresh, set_device elsewhere": (fresh(chosen=1, local_rank=0), STOCK),
    "with torch.cuda.device(k), nothing else known": (fresh(current=2), 2),
    "with torch.cuda.device(gpus[rank]), gpus=[1,0]": (fresh(current=1, local_rank=0), STOCK),
    "nccl2, which is bound": (fresh(nccl2=True, current=1, chosen=1), STOCK),
    # not in the table of facts
    "set_device(0) only puts back what was before": (fresh(chosen=0, contexts=frozenset({1})), STOCK),
    "LOCAL_RANK=0, work on another GPU": (fresh(local_rank=0, contexts=frozenset({2})), STOCK),
    "one smoke test on GPU 0, then .to(f'cuda:{rank}')": (fresh(local_rank=1, contexts=frozenset({0})), STOCK),
    "set_device(0), a context cannot be told": (fresh(chosen=0, contexts=None), 0),
    "set_device(0) after work elsewhere too": (fresh(chosen=0, contexts=frozenset({0, 1})), 0),
    "set_device(1) after a stray context on GPU 0": (fresh(current=1, chosen=1, contexts=frozenset({0})), 1),
    "current device out of range": (fresh(current=4, chosen=4), STOCK),
    "bound device out of range": (fresh(bound=4), STOCK),
    "current device unknown": (fresh(current=None, chosen=None), STOCK),
    "nothing known": (Facts(), STOCK),
}

NCCL2 = {
    "GPUs 1 and 3, rank 0": (nccl2(current=1, chosen=1, local_rank=0), 1),
    "GPUs 1 and 3, rank 1": (nccl2(current=3, chosen=3, local_rank=1), 3),
    "LOCAL_RANK=0 preset on every rank": (nccl2(current=2, chosen=2), 2),
    "gpus=[3,0], rank 1": (nccl2(chosen=0, local_rank=1), 0),
    "no set_device": (nccl2(local_rank=1), STOCK),
    "set_device comes later": (nccl2(cuda_initialized=False, local_rank=1), STOCK),
}

REPORTS = {
    "pytorch#15051, set_device(0) on rank 1": (fresh(device_count=2, chosen=0), 0),
    "pytorch#53658, several nodes, barrier first": (fresh(device_count=8, current=1, chosen=1), 1),
    "pytorch#60752, set_device was called": (fresh(current=3, chosen=3), 3),
    "pytorch#124714, rank 2 of 2 nodes": (fresh(chosen=0, local_rank=0), 0),
    "pytorch#124714, rank 3 of 2 nodes": (fresh(current=1, chosen=1, local_rank=1), 1),
    "pytorch#134391, subgroup barrier": (fresh(device_count=8, current=5, chosen=5), 5),
    "pytorch#141020, new_group after all_reduce": (fresh(device_count=8, current=1, chosen=1), 1),
    "pytorch#178977, DEBUG=DETAIL hides device_id": (fresh(bound=2), 2),
    "lightning#8139, gpus=[1,2,3]": (fresh(current=1, chosen=1, local_rank=0), 1),
    "lightning#5264, gpus=[1,2] of 3": (fresh(device_count=3, current=2, chosen=2, local_rank=1), 2),
    "ray#42751, barrier on a fresh group": (fresh(current=1, chosen=1), 1),
    "pytorch#193237, LOCAL_RANK=0 preset": (nccl2(device_count=8, current=5, chosen=5), 5),
}


@pytest.mark.parametrize(("facts", "expected"), DANGERS.values(), ids=DANGERS)
def test_danger(facts: Facts, expected: int | None) -> None:
    assert choose_device(facts) == expected


@pytest.mark.parametrize(("facts", "expected"), NCCL2.values(), ids=NCCL2)
def test_nccl2_being_made(facts: Facts, expected: int | None) -> None:
    assert choose_device(facts) == expected


@pytest.mark.parametrize(("facts", "expected"), REPORTS.values(), ids=REPORTS)
def test_public_report(facts: Facts, expected: int | None) -> None:
    assert choose_device(facts) == expected


# ---- stand-ins


class ProcessGroupNCCL:
    """Known by its class name, like the one of torch."""

    initialized = False

    def _is_initialized(self) -> bool:
        return self.initialized


class ProcessGroupNCCL2(ProcessGroupNCCL):
    pass


class ProcessGroupGloo(ProcessGroupNCCL):
    pass


class _ProcessGroupWrapper:
    def __init__(self, backend: Any) -> None:
        self.wrapped_pg = backend


class Group:
    """As much of a process group as torch's own ``barrier`` and ddpfix look at; keeps the options that arrive."""

    def __init__(self, backend: Any = None, devices: str = "cuda", bound: Any = None, collectives: int = 0) -> None:
        self.backend = ProcessGroupNCCL() if backend is None else backend
        self._device_types = [torch.device(device) for device in devices.split()]
        self.bound_device_id = bound
        self.collectives = collectives
        self.options: list[Any] = []

    def _get_backend(self, device: Any) -> Any:
        assert device.type == "cuda"
        return self.backend

    def _get_sequence_number_for_group(self) -> int:
        return self.collectives

    def rank(self) -> int:
        return 1

    def barrier(self, opts: Any) -> Any:
        self.options.append(opts)
        self.collectives += 1
        return types.SimpleNamespace(wait=lambda: None)

    @property
    def device_ids(self) -> list[int]:
        return list(self.options[-1].device_ids)


class Cuda:
    """What torch.cuda reports."""

    initialized = True
    current = 0
    count = 4
    contexts: frozenset[int] = frozenset()

    def set(self, index: int) -> None:
        self.current = index


@pytest.fixture(scope="module", autouse=True)
def stock_torch() -> Iterator[None]:
    """Without what the import of ddpfix has placed, so that nothing but the barrier patch is under test."""
    applied = "applied" in ddpfix.status()["patches"].values()  # type: ignore[attr-defined]
    ddpfix.unpatch()
    yield
    if applied:
        ddpfix.patch()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """A process on a box with four GPUs."""
    state = Cuda()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: state.initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: state.count)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in state.contexts, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", state.set, raising=False)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return state


@pytest.fixture
def placed() -> Iterator[Places]:
    """The barrier patch alone."""
    places = Places()
    _barrier.install(places)
    yield places
    places.take_off()
    _barrier.uninstall()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Any]:
    """A gloo process group of one rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# ---- from the call to the options that reach the process group, through torch's own barrier


def test_a_chosen_gpu_reaches_the_process_group(placed: Places, world: Any, cuda: Cuda) -> None:
    torch.cuda.set_device(2)
    group = Group()
    assert dist.barrier(group) is None
    assert group.device_ids == [2]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((), {"device_ids": None}),  # DeepSpeed
        ((False, None), {}),
        ((False,), {"device_ids": None}),
        ((), {"async_op": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("home", [dist, c10d], ids=lambda module: module.__name__)
def test_every_way_to_name_no_gpu(placed: Places, world: Any, cuda: Cuda, home: Any, args: Any, kwargs: Any) -> None:
    torch.cuda.set_device(2)
    positional, named = Group(), Group()
    home.barrier(positional, *args, **kwargs)
    assert positional.device_ids == [2]
    if not args:
        home.barrier(group=named, **kwargs)
        assert named.device_ids == [2]


def test_the_other_arguments_arrive(placed: Places, world: Any, cuda: Cuda) -> None:
    torch.cuda.set_device(2)
    group = Group()
    assert dist.barrier(group, async_op=True) is not None
    assert group.device_ids == [2]
    if "timeout" in inspect.signature(dist.barrier).parameters:
        for args, kwargs in (((False, None, timedelta(seconds=7)), {}), ((), {"timeout": timedelta(seconds=7)})):
            group = Group()
            dist.barrier(group, *args, **kwargs)
            assert group.device_ids == [2] and group.options[0].timeout == timedelta(seconds=7)


@pytest.mark.parametrize("given", [[3], [0, 1], [], (3,), 3, "3"], ids=str)
def test_given_device_ids_pass_through(placed: Places, world: Any, cuda: Cuda, given: Any) -> None:
    """What torch makes of them: some releases ignore what is no list, some refuse it."""
    torch.cuda.set_device(2)

    def outcome(barrier: Any) -> Any:
        group = Group()
        try:
            barrier(group, device_ids=given)
        except Exception as error:
            return type(error), str(error)
        return group.device_ids

    assert outcome(dist.barrier) == outcome(dist.barrier.__wrapped__)
    if given and isinstance(given, list):
        assert outcome(dist.barrier) == given
        positional = Group()
        dist.barrier(positional, False, given)
        assert positional.device_ids == given


def test_the_second_barrier_stays_where_the_first_was(placed: Places, world: Any, cuda: Cuda) -> None:
    group = Group()
    torch.cuda.set_device(2)
    dist.barrier(group)
    torch.cuda.set_device(3)
    dist.barrier(group)
    assert group.device_ids == []


def test_a_group_that_has_only_sent_and_received(placed: Places, world: Any, cuda: Cuda) -> None:
    torch.cuda.set_device(2)
    group = Group()
    group.backend.initialized = True
    dist.barrier(group)
    assert group.device_ids == []


def test_a_torch_that_cannot_tell_whether_a_backend_is_initialized(placed: Places, world: Any, cuda: Cuda) -> None:
    torch.cuda.set_device(2)
    backend = type("ProcessGroupNCCL", (), {})()  # up to 2.4
    group, used = Group(backend), Group(backend, collectives=1)
    dist.barrier(group)
    dist.barrier(used)
    assert (group.device_ids, used.device_ids) == ([2], [])


@pytest.mark.parametrize(
    "group",
    [
        Group(ProcessGroupGloo(), devices="cuda cpu"),
        Group(ProcessGroupGloo()),
        Group(devices="cpu cuda"),
        Group(ProcessGroupNCCL2()),
        Group(_ProcessGroupWrapper(ProcessGroupGloo())),
    ],
    ids=["gloo", "gloo for cuda", "cpu:gloo,cuda:nccl", "nccl2", "gloo under DETAIL"],
)
def test_groups_that_are_left_alone(placed: Places, world: Any, cuda: Cuda, group: Group) -> None:
    torch.cuda.set_device(2)
    dist.barrier(group)
    assert group.device_ids == []


def test_detail_does_not_hide_the_backend_nor_the_bound_gpu(placed: Places, world: Any, cuda: Cuda) -> None:
    group = Group(_ProcessGroupWrapper(_ProcessGroupWrapper(ProcessGroupNCCL())), bound=torch.device("cuda", 3))
    dist.barrier(group)
    assert group.device_ids == [3]


@pytest.mark.parametrize("bound", [torch.device("cpu", 0), torch.device("cuda")], ids=str)
def test_a_group_bound_to_no_gpu_in_particular(placed: Places, world: Any, cuda: Cuda, bound: Any) -> None:
    torch.cuda.set_device(2)
    group = Group(bound=bound)
    dist.barrier(group)
    assert group.device_ids == []


def test_a_cpu_process_is_asked_nothing_more(placed: Places, world: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cuda(*args: Any) -> Any:
        raise AssertionError("initialises CUDA")

    cuda.initialized = False
    for name in ("current_device", "device_count", "_lazy_init", "synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, no_cuda)
    monkeypatch.setattr(Group, "_get_backend", no_cuda)
    group = Group()
    # not through barrier, where the exception would be swallowed
    assert _barrier.facts_of(group) == Facts()
    assert _barrier.facts_of_new_group(None) == Facts()
    dist.barrier(group)
    assert group.device_ids == []


def test_a_forked_child_of_a_parent_with_cuda(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert _barrier.facts_of(Group()) == Facts()


def test_nothing_that_a_graph_capture_forbids(placed: Places, world: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any) -> Any:
        raise AssertionError("illegal while a graph is captured")

    for name in ("synchronize", "current_stream", "empty_cache", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    torch.cuda.set_device(2)
    assert choose_device(_barrier.facts_of(Group())) == 2


@pytest.mark.parametrize("broken", ["_get_sequence_number_for_group", "_get_backend", "_device_types"])
def test_a_signal_that_fails_leaves_torch_alone(placed: Places, world: Any, cuda: Cuda, broken: str, caplog: Any) -> None:
    torch.cuda.set_device(2)
    group = Group()

    def fail(*args: Any) -> Any:
        raise RuntimeError("not on this torch")

    setattr(group, broken, None if broken == "_device_types" else fail)
    with caplog.at_level(logging.DEBUG, "ddpfix"):
        dist.barrier(group)
    assert group.device_ids == []
    assert [record.levelname for record in caplog.records if "left to torch" in record.message] == ["DEBUG"]


def test_the_wrapper_under_the_old_name_does_what_torch_does_once_it_is_off(world: Any, cuda: Cuda) -> None:
    places = Places()
    _barrier.install(places)
    torch.cuda.set_device(2)
    kept, group_barrier = dist.barrier, c10d.ProcessGroup.barrier
    places.take_off()
    _barrier.uninstall()
    group = Group()
    kept(group)
    assert group.device_ids == []
    assert group_barrier(world) is not None


# ---- LOCAL_RANK


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0"}, [0]),
        ({"LOCAL_RANK": "0"}, []),  # preset by a cluster, the same for every process
        ({"RANK": "4", "LOCAL_RANK": "0"}, []),  # inherited from the parent of mp.spawn
        ({"RANK": "0", "LOCAL_RANK": "1"}, []),
        ({"RANK": "0", "LOCAL_RANK": ""}, []),
        ({"RANK": "x", "LOCAL_RANK": "0"}, []),
        ({}, []),
    ],
    ids=str,
)
def test_local_rank_counts_where_it_was_set_for_this_rank(
    placed: Places, world: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: list[int]
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    group = Group()
    dist.barrier(group)
    assert group.device_ids == expected


def test_contexts_are_looked_at(placed: Places, world: Any, cuda: Cuda) -> None:
    cuda.contexts = frozenset({1})
    torch.cuda.set_device(0)
    group = Group()
    dist.barrier(group)
    assert group.device_ids == []


# ---- set_device


@pytest.mark.parametrize("device", [0, "cuda:0", torch.device("cuda", 0), torch.cuda.device(0)], ids=repr)
def test_set_device_is_recorded(placed: Places, world: Any, cuda: Cuda, device: Any) -> None:
    for args, kwargs in (((device,), {}), ((), {"device": device})):
        torch.cuda.set_device(*args, **kwargs)
        group = Group()
        dist.barrier(group)
        assert group.device_ids == [0]
        _barrier._forget()


def test_set_device_is_recorded_when_torch_has_accepted_it(
    placed: Places, world: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.set_device(-1)  # torch does nothing
    with pytest.raises(ValueError):
        torch.cuda.set_device("cpu")
    with pytest.raises(TypeError):
        torch.cuda.set_device()  # type: ignore[call-arg]

    def no_such_gpu(index: int) -> None:
        raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(torch._C, "_cuda_setDevice", no_such_gpu)
    with pytest.raises(RuntimeError, match="ordinal"):
        torch.cuda.set_device(0)
    assert _barrier._chosen_here() is None


def test_a_device_that_only_torch_understands_is_not_guessed_at(cuda: Cuda) -> None:
    set_device = _barrier._recording(lambda device: None)
    set_device(1)
    assert _barrier._chosen_here() == 1
    set_device(object())
    assert _barrier._chosen_here() is None
    _barrier.uninstall()


@pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="torch.accelerator came with torch 2.6")
def test_set_device_index_is_recorded(placed: Places, world: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_setDeviceIndex", cuda.set)
    monkeypatch.setattr(sys.modules["torch.accelerator"], "_get_device_index", lambda device, optional: device)
    torch.accelerator.set_device_index(0)
    group = Group()
    dist.barrier(group)
    assert group.device_ids == [0]


def test_the_thread_that_pins_memory_chooses_nothing(placed: Places, world: Any, cuda: Cuda) -> None:
    thread = threading.Thread(target=torch.cuda.set_device, args=(0,))
    thread.start()
    thread.join()
    group = Group()
    dist.barrier(group)
    assert group.device_ids == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_takes_no_choice_over(placed: Places, cuda: Cuda) -> None:
    torch.cuda.set_device(2)
    child = os.fork()
    if child == 0:
        os._exit(0 if _barrier._chosen_here() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert _barrier._chosen_here() == 2


def test_taking_the_patch_off_forgets_the_choice(cuda: Cuda) -> None:
    places = Places()
    _barrier.install(places)
    torch.cuda.set_device(2)
    assert _barrier._chosen_here() == 2
    places.take_off()
    _barrier.uninstall()
    assert _barrier._chosen_here() is None


# ---- barriers that stay what they are, on real groups


def test_gloo_barriers_work_and_count_as_before(placed: Places, world: Any) -> None:
    before = world._get_sequence_number_for_group()
    dist.barrier()
    dist.barrier(world, False, None)
    dist.barrier(device_ids=[0])
    world.barrier().wait()
    work = dist.barrier(async_op=True)
    work.wait()
    assert world._get_sequence_number_for_group() == before + 5


def test_gloo_on_a_gpu_box_stays_on_the_cpu(placed: Places, world: Any, cuda: Cuda) -> None:
    torch.cuda.set_device(2)
    assert choose_device(_barrier.facts_of(None)) is None
    assert _barrier.facts_of(None).cuda_initialized  # it is the kind of group that decides here
    dist.barrier()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build has CUDA")
def test_a_cpu_only_build(placed: Places, world: Any) -> None:
    with pytest.raises(Exception):  # noqa: B017
        torch.cuda.current_device()
    assert _barrier.facts_of(None) == Facts()
    for device_ids in (None, [0], [3], [0, 1]):
        dist.barrier(device_ids=device_ids)


@pytest.mark.parametrize("device_ids", [None, ["nonsense"]], ids=str)
def test_a_rank_that_is_not_in_the_group(placed: Places, world: Any, cuda: Cuda, device_ids: Any) -> None:
    torch.cuda.set_device(2)
    with pytest.warns(UserWarning, match="does not belong to"):
        assert dist.barrier(dist.GroupMember.NON_GROUP_MEMBER, device_ids=device_ids) is None


@pytest.mark.parametrize("initialized", [False, True], ids=["CPU", "GPU box"])
def test_not_initialised_says_so_in_the_words_of_torch(placed: Places, cuda: Cuda, initialized: bool) -> None:
    cuda.initialized = initialized
    errors = []
    for barrier in (dist.barrier, dist.barrier.__wrapped__):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            barrier()
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1] and "has not been initialized" in errors[0][1]


def test_wrong_arguments_say_so_in_the_words_of_torch(placed: Places, world: Any, cuda: Cuda) -> None:
    for args, kwargs in (((None, False, None, None, 5), {}), ((), {"nonsense": 1}), ((None,), {"group": None})):
        with pytest.raises(TypeError) as caught:
            dist.barrier(*args, **kwargs)
        with pytest.raises(TypeError) as expected:
            dist.barrier.__wrapped__(*args, **kwargs)
        assert str(caught.value) == str(expected.value)


def test_monitored_barrier_is_not_touched() -> None:
    before = dist.monitored_barrier, c10d.monitored_barrier, c10d._store_based_barrier
    places = Places()
    _barrier.install(places)
    assert (dist.monitored_barrier, c10d.monitored_barrier, c10d._store_based_barrier) == before
    places.take_off()
    _barrier.uninstall()


# ---- ProcessGroup.barrier


def group_barrier() -> tuple[Any, list[Any]]:
    """The closure for ``ProcessGroup.barrier`` before a stand-in for torch's own, and the calls that arrive there."""
    calls: list[Any] = []

    def barrier(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    return _barrier._group_barrier_on_device(barrier), calls


def test_a_direct_call_gets_options_with_the_gpu(placed: Places, world: Any, cuda: Cuda) -> None:
    torch.cuda.set_device(2)
    barrier, calls = group_barrier()
    barrier(Group())
    ((options,), kwargs) = calls[0]
    assert list(options.device_ids) == [2] and options.device == torch.device("cuda", 2) and kwargs == {}
    stock = c10d.BarrierOptions()
    assert options.timeout == stock.timeout
    assert getattr(options, "asyncOp", None) == getattr(stock, "asyncOp", None)


@pytest.mark.parametrize("kwargs", [{"opts": c10d.BarrierOptions()}, {"timeout": timedelta(seconds=1)}], ids=["opts", "timeout"])
def test_a_call_with_options_is_the_callers_own(placed: Places, world: Any, cuda: Cuda, kwargs: Any) -> None:
    """Among them the nested call of torch.distributed.barrier."""
    torch.cuda.set_device(2)
    barrier, calls = group_barrier()
    barrier(Group(), **kwargs)
    barrier(Group(), *kwargs.values())
    assert calls == [((), kwargs), (tuple(kwargs.values()), {})]


def test_a_direct_call_for_which_nothing_is_chosen(placed: Places, world: Any, cuda: Cuda) -> None:
    barrier, calls = group_barrier()
    barrier(Group())
    assert calls == [((), {})]


def test_a_group_barrier_that_was_bound_before(world: Any) -> None:
    bound = world.barrier
    places = Places()
    _barrier.install(places)
    bound().wait()
    places.take_off()
    _barrier.uninstall()
    bound().wait()


def test_a_python_group_without_a_barrier_of_its_own_does_not_recurse(tmp_path: Path) -> None:
    """In a process of its own: without the guard of pybind11 it ends on the C stack."""
    script = write(
        tmp_path / "script.py",
        """
        import ddpfix
        from torch.distributed.distributed_c10d import ProcessGroup

        class Own(ProcessGroup):
            def __init__(self):
                super().__init__(0, 1)

        assert ddpfix.status()["patches"]["barrier"] == "applied"
        try:
            Own().barrier()
        except Exception as error:
            print(type(error).__name__, error)
        ddpfix.unpatch()
        try:
            Own().barrier()
        except Exception as error:
            print(type(error).__name__, error)
        """,
    )
    patched, stock = python(script, env=environment(DDPFIX_DISABLE="join")).stdout.splitlines()
    assert patched == stock and "Recursion" not in stock


# ---- torch 2.15's choice when the group is made


class Opts:
    """``_DistributedBackendOptions``"""

    def __init__(self, bound: Any = None, rank: int = 1, ranks: Any = (), reconfigure: bool = False, group: bool = True) -> None:
        self.process_group = types.SimpleNamespace(bound_device_id=bound) if group else None  # compares by its attributes
        self.group_rank = rank
        self.global_ranks_in_group = list(ranks)
        self.enable_reconfigure = reconfigure


def stock_nccl2_device(opts: Any) -> Any:
    """As in torch 2.15, with GPU 9 for its guess."""
    if opts.enable_reconfigure:
        return None
    if opts.process_group is not None and opts.process_group.bound_device_id is not None:
        return opts.process_group.bound_device_id
    return torch.device("cuda", 9)


@pytest.fixture
def nccl2_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(c10d, "_nccl2_device", stock_nccl2_device, raising=False)
    places = Places()
    _barrier.install(places)
    assert c10d._nccl2_device is not stock_nccl2_device
    yield lambda *args, **kwargs: c10d._nccl2_device(*args, **kwargs)
    places.take_off()
    _barrier.uninstall()
    assert c10d._nccl2_device is stock_nccl2_device


def test_nccl2_is_bound_to_the_current_gpu(nccl2_device: Any, cuda: Cuda) -> None:
    torch.cuda.set_device(3)
    for opts in (Opts(), Opts(rank=0, ranks=[2, 3])):
        assert nccl2_device(opts) == torch.device("cuda", 3)
        assert opts.process_group.bound_device_id == torch.device("cuda", 3)
    assert nccl2_device(opts=Opts()) == torch.device("cuda", 3)


def test_nccl2_is_bound_to_gpu_0_where_that_was_chosen(nccl2_device: Any, cuda: Cuda) -> None:
    torch.cuda.set_device(0)
    assert nccl2_device(Opts()) == torch.device("cuda", 0)


def test_nccl2_knows_the_global_rank(nccl2_device: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _barrier.facts_of_new_group(Opts(rank=3)).local_rank == 1
    assert _barrier.facts_of_new_group(Opts(rank=1, ranks=[2, 3])).local_rank == 1
    assert _barrier.facts_of_new_group(Opts(rank=1)).local_rank is None


@pytest.mark.parametrize(
    ("opts", "expected"),
    [
        (Opts(bound=torch.device("cuda", 1)), torch.device("cuda", 1)),
        (Opts(reconfigure=True), None),
        (Opts(group=False), torch.device("cuda", 9)),
    ],
    ids=["bound", "reconfigurable", "no group object"],
)
def test_nccl2_groups_that_are_left_alone(nccl2_device: Any, cuda: Cuda, opts: Any, expected: Any) -> None:
    torch.cuda.set_device(3)
    before = copy.copy(opts.process_group)
    assert _barrier.facts_of_new_group(opts) == Facts()
    assert nccl2_device(opts) == expected
    assert opts.process_group == before


def test_nccl2_where_nothing_was_chosen(nccl2_device: Any, cuda: Cuda) -> None:
    assert nccl2_device(Opts()) == torch.device("cuda", 9)
    cuda.initialized, cuda.current = False, 2
    assert nccl2_device(Opts()) == torch.device("cuda", 9)


# ---- placing


def test_every_place_is_taken_off_by_identity() -> None:
    def attributes() -> list[Any]:
        owners = [(dist, "barrier"), (c10d, "barrier"), (c10d.ProcessGroup, "barrier"), (torch.cuda, "set_device"), (c10d, "_nccl2_device")]
        if hasattr(torch, "accelerator"):
            owners.append((torch.accelerator, "set_device_index"))
        return [vars(owner).get(name) for owner, name in owners]

    before = attributes()
    places = Places()
    _barrier.install(places)
    during = attributes()
    places.take_off()
    _barrier.uninstall()
    assert all(one is other for one, other in zip(before, attributes()))
    assert all(one is not other for one, other in zip(before, during) if one is not None)
    assert during[0] is during[1]


def test_what_is_placed_is_a_plain_function_that_pickles_and_copies(placed: Places) -> None:
    for function in (dist.barrier, c10d.barrier, torch.cuda.set_device):
        assert type(function) is types.FunctionType
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy(function) is function and copy.copy(function) is function
        assert inspect.signature(function) == inspect.signature(function.__wrapped__)
        assert not [name for name in vars(function) if name != "__wrapped__"]
    assert dist.barrier is c10d.barrier


def test_a_barrier_that_another_module_has_imported_before() -> None:
    early = types.ModuleType("imports_barrier_early")
    exec("from torch.distributed import barrier as meet", vars(early))
    sys.modules[early.__name__] = early
    stock = early.meet
    places = Places(late=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _barrier.install(places)
            places.rebind()
        assert early.meet is dist.barrier is not stock
        assert not [each for each in caught if "ddpfix" in str(each.message)]
    finally:
        places.take_off()
        _barrier.uninstall()
        del sys.modules[early.__name__]
    assert early.meet is dist.barrier is stock


def test_a_barrier_that_the_script_has_imported_before_ddpfix(tmp_path: Path) -> None:
    script = write(
        tmp_path / "script.py",
        """
        from torch.distributed import barrier
        stock = id(barrier)  # a global that held the function itself would be rebound as well
        import ddpfix
        import torch.distributed as dist
        assert barrier is dist.barrier and id(barrier) != stock
        ddpfix.unpatch()
        assert barrier is dist.barrier and id(barrier) == stock
        """,
    )
    python(script, env=environment(DDPFIX_DISABLE="join"))


@pytest.mark.parametrize("missing", ["torch.cuda.set_device", "ProcessGroup.barrier", "_nccl2_device", "BarrierOptions"])
def test_a_name_that_is_missing_costs_no_more_than_what_needs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, missing: str, world: Any, cuda: Cuda
) -> None:
    owner: Any = {"torch.cuda.set_device": torch.cuda, "ProcessGroup.barrier": c10d.ProcessGroup}.get(missing, c10d)
    name = missing.rpartition(".")[2]
    if missing == "ProcessGroup.barrier":
        monkeypatch.setattr(c10d, "ProcessGroup", type("ProcessGroup", (), {}))
    else:
        monkeypatch.delattr(owner, name, raising=False)
    places = Places()
    with caplog.at_level(logging.DEBUG, "ddpfix"):
        _barrier.install(places)
    what = "ProcessGroup.barrier" if missing == "BarrierOptions" else missing
    assert [record.levelname for record in caplog.records if f"{what}:" in record.message] == ["DEBUG"]
    if missing != "BarrierOptions":
        cuda.set(2)
        group = Group()
        dist.barrier(group)
        assert group.device_ids == [2]
    places.take_off()
    _barrier.uninstall()


def test_no_barrier_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(c10d, "barrier")
    with pytest.raises(Unavailable, match="barrier"):
        _barrier.install(Places())


def test_a_barrier_with_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def barrier(group: Any = None, *, device_ids: Any = None) -> None:
        pass

    monkeypatch.setattr(c10d, "barrier", barrier)
    places = Places()
    with pytest.raises(Unavailable, match=r"barrier takes \(group, device_ids\)"):
        _barrier.install(places)
    assert places.take_off() == [] and c10d.barrier is barrier


# ---- torch.compile


def looked_into() -> None:
    """A function that torch.compile looks into."""


@pytest.fixture(scope="module")
def skipped() -> None:
    """What the registry does when torch.compile is used for the first time."""
    importlib.import_module("torch._dynamo")
    assert any(module in sys.modules for module in _barrier.LATER)
    for function in _barrier.LATER.values():
        function(Places())
    check = getattr(sys.modules.get("torch._dynamo.trace_rules"), "check", None)
    if check is not None:  # 2.3 on
        assert check(_barrier.facts_of) and not check(looked_into)


def test_graph_breaks_are_those_of_stock(skipped: None, world: Any, cuda: Cuda) -> None:
    import torch._dynamo

    cuda.initialized = False

    def meets(x: Any) -> Any:
        x = x + 1
        dist.barrier()
        return x * 2

    def moves(x: Any) -> Any:
        x = x + 1
        torch.cuda.set_device(2)
        return x * 2

    def behaviour() -> list[Any]:
        found: list[Any] = []
        for function in (meets, moves):
            torch._dynamo.reset()
            explained = torch._dynamo.explain(function)(torch.zeros(1))
            found += [explained.graph_count, explained.graph_break_count]
            torch._dynamo.reset()
            found.append(torch.compile(function, backend="eager")(torch.zeros(1)).item())
            torch._dynamo.reset()
            try:
                torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(1))
            except Exception as error:
                found.append(type(error).__name__)
        torch._dynamo.reset()
        return found

    stock = behaviour()
    places = Places()
    _barrier.install(places)
    try:
        assert behaviour() == stock
        assert cuda.current == 2 and _barrier._chosen_here() == 2
    finally:
        places.take_off()
        _barrier.uninstall()
    assert behaviour() == stock


def test_a_compiled_function_meets_on_the_chosen_gpu(skipped: None, placed: Places, world: Any, cuda: Cuda) -> None:
    """torch.compile drops some kinds of wrappers without a word."""
    import torch._dynamo

    torch.cuda.set_device(2)
    group = Group()

    def meets(x: Any) -> Any:
        x = x + 1
        dist.barrier(group)
        return x * 2

    torch._dynamo.reset()
    assert torch.compile(meets, backend="eager")(torch.zeros(1)).item() == 2
    assert group.device_ids == [2]
    torch._dynamo.reset()
