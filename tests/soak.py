"""A soak test: the ranks of one process group train for minutes, and nothing may grow, slow down or be wrong.

::

    python tests/soak.py --minutes 10 --ranks 4
    python tests/soak.py --minutes 2 --phases models groups
    python tests/soak.py --minutes 1 --phases votes --plant ballots   # a planted fault, to see that it is found

There are five phases, and each is run twice: with ddpfix on uneven inputs (two thirds of the time), then without it on even ones, so that
what stock torch leaks is not held against ddpfix.

* ``programs``: random programs (see programs.py), a reference program and a new even and a new uneven one in each round. All ranks must end
  equal, collectives must have returned what they should, and even programs must do the same with and without ddpfix, to the bit.
* ``epochs``: thousands of epochs of a loader of one to three batches, with one model.
* ``models``: models and optimizers made, trained a step or two and dropped; once the ranks have met, none may be alive.
* ``groups``: process groups made and destroyed, the default one and subgroups, each with a model.
* ``votes``: even steps with an ``all_reduce`` each, of a model with one parameter, as fast as they go.

Each interval, every rank counts its Python objects by type, the items in their containers, memory blocks of the interpreter, threads and open
files, and its resident memory. One line of it is printed. What is compared are the medians of the first and of the last third of these samples,
after a warm-up, and so is the time for one iteration. The exit code is 1 if something has grown, slowed down or was wrong.
A rank that does not get on for ``--stall`` seconds prints where each of its threads is, and ends.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import weakref
import zlib
from typing import Any, Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from loops import BATCH, Context, Net, NormNet, Shard, ShardSampler, picture, train_step
from programs import Collective, Interpreter, Program, _place, draw, wrong_value
from ranks import DDPFIX, STOCK, Outcome, Ranks
from test_loops import unequal_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

#: Share of the samples that is warm-up: caches fill, and pages that the ranks share with the process they were forked from are touched.
WARM_UP = 0.25
#: What may grow between the medians of the first and of the last third: so much, and so much for each iteration in between. Of a type of
#: object hardly anything; the interpreter's blocks also hold the strings and numbers of caches.
SLACK = {"objects": (6, 0.02), "items": (40, 0.05), "blocks": (400, 0.2), "threads": (1, 0.02), "files": (1, 0.02), "kilobytes": (8192, 0.0)}
#: What ddpfix keeps of the last 64 places that broadcast something; each random program has places of its own.
KEPT = {"objects of torch.Tensor": 64}
#: By how much an iteration may take longer in the last third. Waiting counts in the seconds, but so does whatever else the machine does.
SLOWER = {"cpu": 1.5, "seconds": 2.0}
#: How many more there may be in the end than without ddpfix: growth may also have come to its end before the first third.
MORE = {"threads": 4, "files": 12}
#: A phase goes on until it has so many samples, but not for more than three times its seconds.
SAMPLES = 8


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the ranks are to run.

    Arguments:
        phase: one of :data:`PHASES`.
        seconds: for how long.
        interval: seconds between two samples.
        stall: seconds without getting on after which a rank says where it is, and ends.
        folder: where the samples and the files of stores are.
        plant: one of :data:`PLANTS`, or nothing.
        cycle: number of programs after which the same ones come again.
    """

    phase: str
    seconds: float
    interval: float
    stall: float
    folder: str
    plant: str = ""
    cycle: int = sys.maxsize

    def path(self, mode: str, rank: int) -> str:
        return os.path.join(self.folder, f"{self.phase} {mode} {rank}")


# ---------------------------------------------------------------------------------------------------------------------------------------
# On a rank


def run(rank: int, world_size: int, mode: str, spec: Spec) -> None:
    """The case that the rank processes run."""
    if spec.plant and mode == DDPFIX:
        PLANTS[spec.plant]()
    with Course(rank, world_size, mode, spec) as course:
        PHASES[spec.phase](course)


class Course:
    """Tells a phase when to stop, and takes the samples."""

    def __init__(self, rank: int, world_size: int, mode: str, spec: Spec) -> None:
        self.rank, self.world_size, self.mode, self.spec = rank, world_size, mode, spec
        self.uneven = mode == DDPFIX
        self.iterations = self.programs = 0
        self.settles = 0  # no samples before so many iterations
        self._votes_before = self._votes_seen = 0
        self._began = time.monotonic()
        self._sampled, self._samples = self._began, 0
        self._file = open(spec.path(mode, rank), "w")  # noqa: SIM115 (closed by __exit__)
        self._times: dict[str, list[float]] = {name: [] for name in SLOWER}
        self._round = (0, 0.0, 0.0)
        # What is there already is counted once and for all, so that a sample is cheap. Its containers may still take in more.
        gc.collect()
        self._old = [thing for thing in gc.get_objects() if type(thing) in _CONTAINERS]
        gc.freeze()

    def __enter__(self) -> Course:
        self._get_on()
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        gc.unfreeze()
        self._file.close()

    def _get_on(self) -> None:
        faulthandler.dump_traceback_later(self.spec.stall, exit=True)
        self._round = (self.iterations, time.monotonic(), time.process_time())

    def timed(self, iterations: int = 1) -> None:
        """Count what has been done since the last round, or since the last call of this, as iterations."""
        before, began, cpu = self._round
        self._times["seconds"].append((time.monotonic() - began) / iterations)
        self._times["cpu"].append((time.process_time() - cpu) / iterations)
        self.iterations += iterations
        self._round = (self.iterations, time.monotonic(), time.process_time())

    def goes_on(self) -> bool:
        """Meet the other ranks after a round; whether there is to be another one. Nothing of the round may be referred to any more."""
        now = time.monotonic()
        lasts = (now - self._began) / self.spec.seconds
        over = lasts > 1 and self._samples >= SAMPLES or lasts > 10  # on a busy machine
        samples = now - self._sampled > self.spec.interval and self.iterations >= self.settles
        # The first rank decides for all.
        word = torch.tensor([2 if over else int(samples)])
        dist.broadcast(word, 0)
        if word.item() == 1:
            self._sample()
        if word.item() == 2:
            return False
        self._get_on()
        return True

    def note(self, **what: Any) -> None:
        """Tell something that is no sample."""
        self._file.write(json.dumps(what) + "\n")

    def batches(self, number: int) -> int:
        """Number of batches of an epoch, one to three; on even inputs the same on all ranks."""
        return zlib.crc32(f"{number} {self.rank if self.uneven else 0}".encode()) % 3 + 1

    def equal(self, tensors: Iterable[torch.Tensor], what: str) -> None:
        """All ranks must have the same numbers."""
        mine = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        assert torch.equal(least, most), f"{what} differ between ranks after {self.iterations} iterations: {least} and {most}"

    @property
    def votes(self) -> int:
        """Votes so far; those of groups that are gone as far as they have been seen."""
        if self.mode != DDPFIX:
            return 0
        import ddpfix

        details: Any = ddpfix.status().get("join_details", {"process_groups": []})
        now = sum(group["votes"] for group in details["process_groups"])
        if now < self._votes_seen:
            self._votes_before += self._votes_seen
        self._votes_seen = now
        return self._votes_before + now

    def _sample(self) -> None:
        gc.collect()
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        things = gc.get_objects()
        objects = collections.Counter(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in things)
        items = sum(map(len, self._old)) + sum(len(thing) for thing in things if type(thing) in _CONTAINERS)
        del things
        self.note(
            at=round(time.monotonic() - self._began, 2),
            iterations=self.iterations,
            programs=self.programs,
            votes=self.votes,
            kilobytes=pages * os.sysconf("SC_PAGE_SIZE") // 1024,
            items=items,
            blocks=sys.getallocatedblocks(),
            threads=len(os.listdir("/proc/self/task")),
            files=len(os.listdir("/proc/self/fd")),
            objects=objects,
            times={name: _lower_quartile(times) for name, times in self._times.items()},
        )
        self._file.flush()
        for times in self._times.values():
            times.clear()
        self._sampled, self._samples = time.monotonic(), self._samples + 1


_CONTAINERS = (list, dict, set, collections.deque)


def _lower_quartile(times: Sequence[float]) -> float | None:
    # Others that use the machine now and then only make it slower.
    return sorted(times)[len(times) // 4] if times else None


# ---------------------------------------------------------------------------------------------------------------------------------------
# Phases


def programs(course: Course) -> None:
    for number in range(sys.maxsize):
        _carry_out(course, 0, course.uneven, 3 * number)
        course.timed()  # the same program each time; others take as long as they take
        _carry_out(course, number % course.spec.cycle, False, 3 * number + 1)
        _carry_out(course, number % course.spec.cycle, course.uneven, 3 * number + 2)
        if not course.goes_on():
            return


def _carry_out(course: Course, index: int, uneven: bool, number: int) -> None:
    """Run a program in the process group that is there, and check what can be checked."""
    program = _with_places_of_its_own(draw(_seed(course.world_size, index), uneven), number)
    groups = set(_groups())
    trained = Interpreter(Context(course.rank, course.world_size, course.mode, program.counts, "sgd"), program).run()
    mine = picture(trained)
    pictures: list[Any] = [None] * course.world_size
    dist.all_gather_object(pictures, mine)
    found = unequal_ranks(pictures, buffers=False)
    if program.uneven:
        found = found or wrong_value(program, [picture["others"]["calls"] for picture in pictures])
    else:
        course.note(program=number, digest=_digest(mine))
    assert found is None, f"program number {number} in this group: {found}\n{program}"
    course.programs += 1
    for group in _groups():
        if group not in groups:
            dist.destroy_process_group(group)
    _place.cache_clear()


def _seed(world_size: int, index: int) -> int:
    """The seed of that program among those for so many ranks."""
    return 5 * (index // 3) + index % 3 if world_size == 2 else 5 * index + world_size


def _with_places_of_its_own(program: Program, number: int) -> Program:
    """The program, with a meeting at its end, and called from other places than those before it: what ddpfix learns of a place must not be false."""

    def moved(thing: Any) -> Any:
        return dataclasses.replace(thing, place=f"{number} {thing.place}") if isinstance(thing, Collective) else thing

    epochs = [
        dataclasses.replace(
            epoch, metric=moved(epoch.metric), during=tuple(map(moved, epoch.during)), after=tuple(map(moved, epoch.after))
        )
        for epoch in program.epochs
    ]
    epochs[-1] = dataclasses.replace(epochs[-1], after=(*epochs[-1].after, Collective("barrier", f"{number} end")))
    return dataclasses.replace(program, epochs=tuple(epochs))


def _groups() -> list[Any]:
    return [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]


def _digest(value: Any, so_far: int = 0) -> int:
    if isinstance(value, torch.Tensor):
        value = value.coalesce().to_dense() if value.is_sparse else value
        # Complex numbers have no bits that could be seen as numbers.
        data = bytes((torch.view_as_real(value) if value.is_complex() else value).contiguous().reshape(-1).view(torch.uint8).tolist())
        return zlib.crc32(data, zlib.crc32(f"{value.dtype}{list(value.shape)}".encode(), so_far))
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, (list, tuple)):
        for one in value:
            so_far = _digest(one, so_far)
        return zlib.crc32(b"]", so_far)
    return zlib.crc32(repr(value).encode(), so_far)


def epochs(course: Course) -> None:
    torch.manual_seed(0)
    model = DDP(NormNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler = ShardSampler([0])
    kept = DataLoader(Shard(course.rank), batch_size=BATCH, sampler=sampler)
    number = 0
    while True:
        for _ in range(20):
            number += 1
            sampler.counts = [course.batches(number)]
            loader = kept if number % 2 else DataLoader(Shard(course.rank), batch_size=BATCH, sampler=sampler)
            for x, y in loader:
                train_step(model, optimizer, x, y)
        course.equal([*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())], "parameters or momentum")
        del loader, x, y
        course.timed(20)
        if not course.goes_on():
            return


def models(course: Course) -> None:
    sampler = ShardSampler([0])
    made: list[weakref.ref[Any]] = []
    number = 0
    while True:
        for _ in range(10):
            number += 1
            made += _one_model(course, sampler, number)
        dist.barrier()
        gc.collect()
        made = [reference for reference in made if reference() is not None]
        alive = collections.Counter(type(reference()).__name__ for reference in made)
        assert not alive or max(alive.values()) <= 2, f"after {number} models, {dict(alive)} are alive though they were dropped"
        course.timed(10)
        if not course.goes_on():
            return


def _one_model(course: Course, sampler: ShardSampler, number: int) -> list[weakref.ref[Any]]:
    model = DDP(Net() if number % 3 else NormNet())
    if number % 4:
        sampler.counts = [course.batches(number)]
    else:
        # Ranks that have met do not keep it any more, and some have no batch of their own.
        dist.barrier()
        sampler.counts = [course.batches(number) - 1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(Shard(course.rank), batch_size=BATCH, sampler=sampler)
    if number % 8 not in (2, 6):
        for x, y in loader:
            train_step(model, optimizer, x, y)
    else:
        for x, y in list(loader):
            train_step(model, optimizer, x, y)
    return [weakref.ref(thing) for thing in (model, model.module, optimizer, scheduler, *model.parameters())]


def groups(course: Course) -> None:
    course.settles = 24  # ddpfix keeps the ballots of the last 64 groups, of which an iteration makes two or three
    number = 0
    while True:
        for _ in range(2):
            number += 1
            _train_on(course, None, number)
            for ranks in (list(range(course.world_size)), [0, 1]):
                group = dist.new_group(ranks)
                if course.rank in ranks:
                    _train_on(course, group, number)
                    dist.destroy_process_group(group)
                del group
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo",
                init_method=f"file://{course.spec.folder}/{course.mode}{number}",
                rank=course.rank,
                world_size=course.world_size,
                timeout=datetime.timedelta(seconds=2 * course.spec.stall),
            )
        course.timed(2)
        if not course.goes_on():
            return


def _train_on(course: Course, group: Any, number: int) -> None:
    model = DDP(Net(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler = ShardSampler([course.batches(number)])
    for x, y in DataLoader(Shard(course.rank), batch_size=BATCH, sampler=sampler):
        train_step(model, optimizer, x, y)
    value = torch.tensor([float(course.rank)])
    dist.all_reduce(value, group=group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    assert value.item() == sum(ranks), f"the sum of the ranks {ranks} is {value.item()}"


def votes(course: Course) -> None:
    model = DDP(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.ones(1, 1)
    ranks, number = range(course.world_size), 0
    while True:
        for _ in range(100):
            number += 1
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            value = torch.tensor([float(number % 1000 + course.rank)])
            dist.all_reduce(value)
            assert value.item() == sum(number % 1000 + rank for rank in ranks), f"sum number {number} is {value.item()}"
        course.timed(100)
        if not course.goes_on():
            return


PHASES: dict[str, Callable[[Course], None]] = {"programs": programs, "epochs": epochs, "models": models, "groups": groups, "votes": votes}


# ---------------------------------------------------------------------------------------------------------------------------------------
# Planted faults, to see that they are found


_planted: list[Any] = []


def _at_each_vote(plant: Callable[[torch.Tensor], Any]) -> None:
    import ddpfix._vote

    original = ddpfix._vote.all_reduce_min

    def all_reduce_min(group: Any, tensor: torch.Tensor, *more: Any) -> Any:
        plant(tensor)
        return original(group, tensor, *more)

    ddpfix._vote.all_reduce_min = all_reduce_min


def _at_each_group(plant: Callable[[], Any]) -> None:
    import ddpfix._store

    original = ddpfix._store.GroupStore.__init__

    def __init__(self: Any, group: Any) -> None:
        plant()
        original(self, group)

    ddpfix._store.GroupStore.__init__ = __init__  # type: ignore[method-assign]


def _keep_ballots() -> None:
    _at_each_vote(_planted.append)


def _keep_numbers() -> None:
    _at_each_vote(lambda _: _planted.append(1000 + len(_planted)))


def _keep_memory() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    _at_each_vote(lambda _: ctypes.memset(ctypes.c_void_p(library.malloc(4096)), 1, 4096))


def _keep_models() -> None:
    original = DDP.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _planted.append(self)

    DDP.__init__ = __init__  # type: ignore[method-assign]


def _keep_threads() -> None:
    _at_each_group(lambda: threading.Thread(target=threading.Event().wait, daemon=True).start())


def _keep_files() -> None:
    _at_each_group(lambda: os.dup(0))


def _get_slower() -> None:
    _at_each_vote(lambda _: (_planted.append(0), sum(_planted)))


def _wait_longer() -> None:
    _at_each_vote(lambda _: (_planted.append(0), time.sleep(2e-6 * len(_planted))))


def _forget_to_catch_up() -> None:
    import ddpfix._catch_up

    ddpfix._catch_up.catch_up = lambda *_: None


def _hang() -> None:
    _at_each_vote(lambda _: (_planted.append(0), len(_planted) == 300 and dist.get_rank() == 1 and time.sleep(3600)))


PLANTS: dict[str, Callable[[], None]] = {
    "ballots": _keep_ballots,
    "numbers": _keep_numbers,
    "memory": _keep_memory,
    "models": _keep_models,
    "threads": _keep_threads,
    "files": _keep_files,
    "slower": _get_slower,
    "longer": _wait_longer,
    "wrong": _forget_to_catch_up,
    "hang": _hang,
}


# ---------------------------------------------------------------------------------------------------------------------------------------
# The verdict


class Samples:
    """What one rank has written."""

    def __init__(self, path: str) -> None:
        self.all: list[dict[str, Any]] = []
        self.digests: dict[int, int] = {}
        with open(path) as file:
            for line in file:
                one = json.loads(line)
                if "digest" in one:
                    self.digests[one["program"]] = one["digest"]
                else:
                    self.all.append(one)
        settled = self.all[max(1, int(WARM_UP * len(self.all))) :]
        third = len(settled) // 3
        self.first, self.last = settled[:third], settled[len(settled) - third :]

    @property
    def enough(self) -> bool:
        return len(self.first) > 1

    @property
    def iterations(self) -> float:
        """From the middle of the first third to that of the last."""
        return _median(self.last, "iterations") - _median(self.first, "iterations")

    def growth(self) -> dict[str, float]:
        """By what it has grown: each kind of thing, and each type of object."""
        found = {name: _median(self.last, name) - _median(self.first, name) for name in SLACK if name != "objects"}
        for name in set().union(*(one["objects"] for one in (*self.first, *self.last))):
            counts = [statistics.median(one["objects"].get(name, 0) for one in third) for third in (self.first, self.last)]
            found[f"objects of {name}"] = counts[1] - counts[0]
        return found

    def slowdown(self) -> dict[str, float]:
        """The time for an iteration in the last third, in terms of that in the first: of the fastest, which other work on the machine left alone."""
        found = {}
        for name in SLOWER:
            first, last = ([one["times"][name] for one in third if one["times"][name]] for third in (self.first, self.last))
            if first and last:
                found[name] = min(last) / min(first)
        return found


def _median(samples: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(one[name] for one in samples)


def _slack(name: str, iterations: float) -> float:
    constant, each = SLACK["objects" if name.startswith("objects") else name]
    return KEPT.get(name, constant) + each * iterations


def verdict(ours: Sequence[Samples], stock: Sequence[Samples], times: Sequence[str] = tuple(SLOWER)) -> list[str]:
    """What is wrong with a phase.

    Arguments:
        ours: the samples of each rank with ddpfix.
        stock: without, or nothing.
        times: which of those of :data:`SLOWER` are judged.
    """
    found = []
    leaks: dict[str, float] = {}  # what stock leaks in an iteration
    for samples in stock:
        for name, by in samples.growth().items() if samples.enough else ():
            if by > _slack(name, samples.iterations):
                leaks[name] = max(leaks.get(name, 0.0), by / samples.iterations)
    for rank, samples in enumerate(ours):
        if not samples.enough:
            found.append(f"rank {rank}: {len(samples.all)} samples are too few to tell")
            continue
        between = samples.iterations
        for name, by in sorted(samples.growth().items()):
            if by > _slack(name, between) + 1.5 * leaks.get(name, 0.0) * between:
                theirs = f", {1000 * leaks[name]:.1f} without ddpfix" if name in leaks else ""
                found.append(f"rank {rank}: {name} +{by:g} in {between:g} iterations ({1000 * by / between:.1f} in a thousand{theirs})")
        for name, factor in samples.slowdown().items():
            if factor > SLOWER[name] and name in times:
                found.append(f"rank {rank}: {name} of an iteration {factor:.2f} times those at the beginning")
    for rank, (mine, theirs) in enumerate(zip(ours, stock)):
        for name, more in MORE.items() if mine.last and theirs.last else ():
            here, there = _median(mine.last, name), _median(theirs.last, name)
            if here > there + more:
                found.append(f"rank {rank}: {here:g} {name} in the end, {there:g} without ddpfix")
        differ = [number for number, digest in mine.digests.items() if theirs.digests.get(number, digest) != digest]
        if mine.digests and not mine.digests.keys() & theirs.digests.keys():
            found.append(f"rank {rank}: no even program was run with and without ddpfix")
        if differ:
            found.append(f"rank {rank}: even programs number {differ} end otherwise than without ddpfix")
    return found


def run_phase(
    ranks: Ranks, world_size: int, spec: Spec, share: float = 2 / 3, times: Sequence[str] = tuple(SLOWER)
) -> tuple[list[str], list[Samples], list[Samples]]:
    """Run a phase with ddpfix, for that share of its time, and without; what is wrong, and the samples of both."""
    samples: dict[str, list[Samples]] = {DDPFIX: [], STOCK: []}
    for mode, part in ((DDPFIX, share), (STOCK, 1 - share)):
        if part <= 0:
            continue
        seconds = part * spec.seconds
        outcome: Outcome = ranks.run(
            "soak:run",
            world_size,
            mode,
            dataclasses.replace(spec, seconds=seconds),
            # Longer than it takes a rank to tell that it stalls.
            timeout=2 * spec.stall,
            hard_limit=3 * seconds + 2 * spec.stall,
        )
        if not outcome.finished:
            return [f"{mode}: {outcome.report()}"], samples[DDPFIX], samples[STOCK]
        samples[mode] = [Samples(spec.path(mode, rank)) for rank in range(world_size)]
    return verdict(samples[DDPFIX], samples[STOCK], times), samples[DDPFIX], samples[STOCK]


# ---------------------------------------------------------------------------------------------------------------------------------------
# As a script


def _follow(spec: Spec, world_size: int, over: threading.Event) -> None:
    """Print a line for each sample, as soon as all ranks have taken it."""
    printed = {DDPFIX: 0, STOCK: 0}
    last = False
    while not last:
        last = over.wait(0.5)  # and once more when it is over
        for mode in printed:
            with contextlib.ExitStack() as stack:
                try:
                    files = [stack.enter_context(open(spec.path(mode, rank))) for rank in range(world_size)]
                except FileNotFoundError:
                    continue
                lines = [[line for line in file if '"kilobytes"' in line and line.endswith("\n")] for file in files]
            for texts in [*zip(*lines)][printed[mode] :]:
                printed[mode] += 1
                samples = [json.loads(text) for text in texts]
                each = samples[0]
                rss = " ".join(f"{one['kilobytes'] / 1024:.1f}" for one in samples)
                print(
                    f"{spec.phase:8} {mode:6} {each['at']:6.1f} s, {each['iterations']:7} iterations, {each['votes']:8} votes, "
                    f"{each['programs']:4} programs, RSS {rss} MiB, {sum(each['objects'].values())} objects, {each['items']} items, "
                    f"{each['blocks']} blocks, {each['threads']} threads, {each['files']} files",
                    flush=True,
                )


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains for minutes, and tells what has grown, slowed down or was wrong.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all phases together")
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 3, 4))
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=list(PHASES))
    parser.add_argument("--interval", type=float, help="seconds between two samples; by default a thirtieth of a phase")
    parser.add_argument("--stall", type=float, default=60.0, help="seconds without getting on, after which ranks tell where they are")
    parser.add_argument("--plant", choices=list(PLANTS), default="", help="plant a fault")
    options = parser.parse_args()
    seconds = 60 * options.minutes / len(options.phases)
    ranks = Ranks("import soak")
    wrong: dict[str, list[str]] = {}
    folder = tempfile.mkdtemp(prefix="soak-")
    try:
        for phase in options.phases:
            spec = Spec(phase, seconds, options.interval or seconds / 45, options.stall, folder, options.plant)
            over = threading.Event()
            follower = threading.Thread(target=_follow, args=(spec, options.ranks, over), daemon=True)
            follower.start()
            found, ours, _ = run_phase(ranks, options.ranks, spec)
            over.set()
            follower.join()
            wrong[phase] = found
            slowdown = max((times for samples in ours if samples.enough for times in samples.slowdown().values()), default=float("nan"))
            print(f"{phase}: {'FAILED' if found else 'ok'}, slowdown {slowdown:.2f}", *found, sep="\n    ", flush=True)
    finally:
        ranks.close()
        shutil.rmtree(folder, ignore_errors=True)
    bad = [phase for phase, found in wrong.items() if found]
    print(f"verdict: {'failed: ' + ', '.join(bad) if bad else 'nothing has grown, slowed down or was wrong'}")
    return 1 if bad else 0


if __name__ == "__main__":
    import soak  # by the name under which the ranks know what they are given

    sys.exit(soak.main())
