"""Leaving, waiting long, and ranks that run ddpfix differently: no job that ends well today ends otherwise."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
from compare import difference
from ranks import DDPFIX, HANG_TIMEOUT, STOCK, Outcome, Ranks, logged
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

#: Seconds; shorter than what rank 0 does alone in these scripts.
PATIENCE = {"DDPFIX_PATIENCE": "0.5"}


_kept: list[Any] = []


class Training:
    def __init__(self, rank: int, counts: tuple[int, ...], **options: Any) -> None:
        # Kept until the process ends: to drop the last reference to a process group can hang (see the end of ranks.py).
        _kept.append(self)
        torch.manual_seed(0)
        self.model = DDP(torch.nn.Linear(4, 2), **options)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        samples = list(torch.randn(counts[rank], 4, generator=torch.Generator().manual_seed(rank)))
        self.loader = DataLoader(samples, batch_size=1)  # type: ignore[arg-type,var-annotated]

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).square().sum().backward()
        self.optimizer.step()

    def picture(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def processes_end(others: list[int]) -> None:
    """Waits until the processes of other ranks have ended (and are left to be reaped)."""
    for rank in others:
        pid = int(store().get(f"pid{rank}").decode())
        while True:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    break
            time.sleep(0.01)


# -- rank 0 works alone, after training -----------------------------------------------


def rank_0_evaluates(rank: int, world_size: int, mode: str, counts: tuple[int, ...], destroys: bool, from_list: bool) -> Any:
    store().set(f"pid{rank}", str(os.getpid()))
    training, lines = Training(rank, counts), logged()
    batches = list(training.loader) if from_list else training.loader
    for _ in range(2):
        for x in batches:
            training.step(x)
    if rank == 0:
        processes_end(list(range(1, world_size)))
    if destroys:
        dist.destroy_process_group()
    return lines, training.picture()


def all_end_well(outcome: Outcome) -> None:
    assert outcome.finished and [rank.exit_code for rank in outcome.ranks] == [0] * len(outcome.ranks), (
        [rank.exit_code for rank in outcome.ranks],
        outcome.report(),
    )
    assert all("Traceback" not in rank.output and "terminate" not in rank.output for rank in outcome.ranks), outcome.report()


@pytest.mark.parametrize(("world", "destroys", "from_list"), [(2, False, False), (2, False, True), (3, True, True)])
def test_rank_0_works_alone_for_longer_than_the_others_wait(ranks: Ranks, world: int, destroys: bool, from_list: bool) -> None:
    without = ranks.run(rank_0_evaluates, world, STOCK, (3, 3, 3), destroys, from_list, end="process")
    outcome = ranks.run(rank_0_evaluates, world, DDPFIX, (3, 3, 3), destroys, from_list, end="process", environment=PATIENCE)
    all_end_well(outcome)
    assert difference([value[1] for value in without.values], [value[1] for value in outcome.values]) is None
    if destroys:  # which comes before the log is looked at
        for rank, (lines, _) in enumerate(outcome.values):
            waited = [line for line in lines if line.startswith("WARNING") and "do not answer" in line]
            # Those that met the others at the end of their loops do not wait at all.
            assert len(waited) == (1 if from_list and rank else 0), lines


def test_a_rank_that_shadowed_and_waits_in_vain_says_so(ranks: Ranks) -> None:
    outcome = ranks.run(rank_0_evaluates, 2, DDPFIX, (5, 3), True, True, end="process", environment=PATIENCE)
    all_end_well(outcome)
    lines = outcome.values[1][0]
    assert [line for line in lines if "shadows the other ranks until they have ended theirs" in line and "up to 0.5 seconds" in line], lines
    (warning,) = [line for line in lines if line.startswith("WARNING")]
    assert "leaves without the others, which do not answer (for 0.5 seconds, see DDPFIX_PATIENCE)" in warning
    assert "its model lacks the last steps of the others, of which it has shadowed 4" in warning
    assert not ranks.run(rank_0_evaluates, 2, STOCK, (5, 3), True, True, timeout=HANG_TIMEOUT).finished


def leaves_a_list(rank: int, world_size: int, mode: str, counts: tuple[int, ...], meets: bool) -> Any:
    training, lines = Training(rank, counts), logged()
    for x in list(training.loader):
        training.step(x)
    if meets:
        dist.barrier()
    dist.destroy_process_group()
    return [line for line in lines if line.startswith("WARNING")]


@pytest.mark.parametrize(("counts", "meets", "expected"), [((5, 3), False, [0, 1]), ((5, 3), True, [0, 0]), ((3, 3), False, [0, 0])])
def test_a_rank_whose_end_came_before_the_last_steps_says_so(
    ranks: Ranks, counts: tuple[int, ...], meets: bool, expected: list[int]
) -> None:
    outcome = ranks.run(leaves_a_list, 2, DDPFIX, counts, meets, end="process")
    all_end_well(outcome)
    assert [len(warnings) for warnings in outcome.values] == expected, outcome.values
    for warning in outcome.values[1]:
        assert "when rank 1 had come to its end, others still trained 2 steps" in warning


# -- ends of a process ---------------------------------------------------------------


def ends(rank: int, world_size: int, mode: str, how: str) -> None:
    """Rank 1 has three batches more; from lists, so that nobody sees a loop end."""
    _ENDS[how](rank)


def _train(rank: int) -> Training:
    training = Training(rank, (2, 5))
    for x in list(training.loader):
        training.step(x)
    return training


def _destroys_at_exit(rank: int) -> Any:
    atexit.register(dist.destroy_process_group)  # before the package has armed itself: called after it
    _train(rank)


def _exit_handler_of_the_script(rank: int) -> Any:
    _train(rank)
    atexit.register(dist.destroy_process_group)  # after: called before it


def _cleans_up_by_its_handler(rank: int) -> Any:
    def clean_up(*_: Any) -> None:
        dist.destroy_process_group()

    signal.signal(signal.SIGTERM, clean_up)
    _train(rank)
    clean_up()


def _in_a_thread(rank: int) -> Any:
    thread = threading.Thread(target=_train, args=(rank,))
    thread.start()
    thread.join()


def _in_a_thread_that_is_not_joined(rank: int) -> Any:
    threading.Thread(target=_train, args=(rank,)).start()


def _with_children(rank: int) -> Any:
    """Children that end while the parent still has to leave; they are no ranks."""
    _train(rank)
    child = multiprocessing.get_context("fork").Process(target=sys.exit)
    child.start()
    child.join()
    assert child.exitcode == 0
    pid = os.fork()
    if pid == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


_ENDS: dict[str, Callable[[int], Any]] = {
    "destroys at exit": _destroys_at_exit,
    "an exit handler of the script": _exit_handler_of_the_script,
    "cleans up by its handler": _cleans_up_by_its_handler,
    "in a thread": _in_a_thread,
    "in a thread that is not joined": _in_a_thread_that_is_not_joined,
    "with children": _with_children,
    "plainly": _train,
}


@pytest.mark.parametrize("how", _ENDS)
def test_ends_together(ranks: Ranks, how: str) -> None:
    all_end_well(ranks.run(ends, 2, DDPFIX, how, end="process"))


def test_without_ddpfix_such_ends_fail(ranks: Ranks) -> None:
    assert not ranks.run(ends, 2, STOCK, "plainly", end="process", timeout=HANG_TIMEOUT).finished


def a_daemon_trains_on(rank: int, world_size: int, mode: str) -> None:
    """The main thread of rank 0 ends while a daemon thread of it is in the midst of training."""
    store().set(f"pid{rank}", str(os.getpid()))
    training = Training(rank, (3, 3))
    begun = threading.Event()

    def train() -> None:
        for i in range(1_000_000):
            training.step(torch.ones(1, 4))
            if i == 3:
                begun.set()

    threading.Thread(target=train, daemon=True).start()
    begun.wait()
    if rank == 1:
        processes_end([0])


@pytest.mark.parametrize("mode", [STOCK, DDPFIX])
def test_a_daemon_that_trains_on_holds_nobody_up(ranks: Ranks, mode: str) -> None:
    # How the process ends, with a thread in the midst of a collective, is the same chance with and without.
    outcome = ranks.run(a_daemon_trains_on, 2, mode, end="process")
    assert not outcome.hard_limit_hit and outcome.ranks[0].finished, outcome.report()
    assert "ambient join" not in outcome.ranks[0].output, outcome.report()


def told_to_end(rank: int, world_size: int, mode: str, cleans_up: bool) -> None:
    """A launcher tells rank 0 to end; its handler exits with 0, as handlers do. Rank 1 is in the midst of its own work."""

    def handler(*_: Any) -> None:
        if cleans_up:
            dist.destroy_process_group()
        sys.exit(0)

    store().set(f"pid{rank}", str(os.getpid()))
    training = Training(rank, (3, 3))
    for x in list(training.loader):
        training.step(x)
    if rank == 0:
        signal.signal(signal.SIGTERM, handler)
        os.kill(os.getpid(), signal.SIGTERM)
    processes_end([0])


@pytest.mark.parametrize("cleans_up", [False, True])
def test_a_rank_told_to_end_does_not_stay_for_the_others(ranks: Ranks, cleans_up: bool) -> None:
    for mode in (STOCK, DDPFIX):
        outcome = ranks.run(told_to_end, 2, mode, cleans_up, end="process")
        assert not outcome.hard_limit_hit and outcome.ranks[0].exit_code == 0, outcome.report()
        assert outcome.ranks[1].finished and outcome.ranks[1].exit_code == 0, outcome.report()


# -- long waits ----------------------------------------------------------------------


def waits_long(rank: int, world_size: int, mode: str, where: str) -> Any:
    """Rank 0 works alone for longer than the timeout of the default group, and the script knows: it waits on a patient group."""
    patient = dist.new_group(timeout=timedelta(seconds=60))
    training = Training(rank, (3, 3, 3))
    number = 0
    for _ in range(2):
        for x in training.loader:
            training.step(x)
            number += 1
            if number == 3 and where == "in the loop":
                if rank == 0:
                    time.sleep(2 * HANG_TIMEOUT)  # the work itself, not a way to meet
                dist.barrier(group=patient)
            if number == 3 and where == "at its end" and rank == 0:
                time.sleep(2 * HANG_TIMEOUT)
        dist.barrier(group=patient)
    if mode == DDPFIX:
        import ddpfix

        status: Any = ddpfix.status()["join_details"]
        assert [group["off"] for group in status["process_groups"]] == [None]
    return training.picture()


@pytest.mark.parametrize(("world", "where"), [(2, "in the loop"), (3, "at its end")])
def test_votes_wait_as_long_as_the_collectives_of_the_script(ranks: Ranks, world: int, where: str) -> None:
    values = [ranks.run(waits_long, world, mode, where, timeout=HANG_TIMEOUT).values for mode in (STOCK, DDPFIX)]
    found = difference(*values)
    assert found is None, found


def impatient_group(rank: int, world_size: int, mode: str) -> None:
    """The script's own group gives up soon; a vote on the default group must not make it wait longer."""
    soon = dist.new_group(timeout=timedelta(seconds=HANG_TIMEOUT))
    training = Training(rank, (3, 3))
    for x in training.loader:
        training.step(x)
    if rank == 0:
        processes_end([1])
    store().set("pid1", str(os.getpid()))
    dist.barrier(group=soon)


def test_a_vote_gives_up_when_the_collective_would(ranks: Ranks) -> None:
    for mode in (STOCK, DDPFIX):
        outcome = ranks.run(impatient_group, 2, mode)
        assert not outcome.hard_limit_hit, outcome.report()
        assert outcome.ranks[1].error is not None and "RuntimeError" in outcome.ranks[1].line(), outcome.report()


# -- not all ranks run it -------------------------------------------------------------


def not_alike(rank: int, world_size: int, mode: str, environments: tuple[dict[str, str] | None, ...], init_sync: bool = True) -> Any:
    environment = environments[rank]
    lines: list[str] = []
    if environment is not None:
        os.environ.update(environment)
        if "ddpfix" in sys.modules:
            raise AssertionError("this case is for a server that has not imported it")
        import ddpfix

        assert ddpfix.status()["patches"] is not None
        lines = logged()
    training = Training(rank, (3, 3, 3), **({} if init_sync else {"init_sync": False}))
    for _ in range(2):
        for x in training.loader:
            training.step(x)
        dist.barrier()
    return [line for line in lines if "alike" in line], training.picture()


@pytest.mark.parametrize("init_sync", [True, False], ids=["", "init_sync=False"])
@pytest.mark.parametrize(
    ("environments", "words"),
    [
        (({}, None), "rank 1 runs without it (or without its patch join), rank 0 runs with it"),
        ((None, {}), "rank 0 runs without it (or without its patch join), rank 1 runs with it"),
        (({}, None, {}), "rank 1 runs without it (or without its patch join), ranks 0, 2 run with it"),
        ((None, None, {}), "ranks 0, 1 run without it (or without its patch join), rank 2 runs with it"),
        (({}, {"DDPFIX_DISABLE": "join"}, {}), "rank 1 runs without it (or without its patch join), ranks 0, 2 run with it"),
        (({}, {"DDPFIX_UNEVEN": "stop"}), "DDPFIX_UNEVEN is auto on rank 0, stop on rank 1"),
        (({"DDPFIX_LOOP_END": "0"}, {}, {}), "DDPFIX_LOOP_END is 0 on rank 0, 1 on ranks 1, 2"),
        (({"DDPFIX_WATCH": "5"}, {"DDPFIX_PATIENCE": "7"}), None),
    ],
)
def test_ranks_that_do_not_run_it_alike_run_without_it(
    ranks: Ranks, environments: tuple[dict[str, str] | None, ...], words: str | None, init_sync: bool
) -> None:
    world = len(environments)
    timeout = None if init_sync else 2 * HANG_TIMEOUT  # half of it is what they wait for a word
    without = ranks.run(not_alike, world, STOCK, (None,) * world, timeout=timeout).values
    with_it = ranks.run(not_alike, world, STOCK, environments, timeout=timeout).values
    assert difference([value[1] for value in without], [value[1] for value in with_it]) is None
    said = [(rank, line) for rank, (lines, _) in enumerate(with_it) for line in lines if line.startswith("WARNING")]
    if words is None:
        assert said == []
        return
    ((speaker, line),) = said  # one rank speaks for all
    assert speaker == min(rank for rank, one in enumerate(environments) if one is not None and "DDPFIX_DISABLE" not in one)
    assert f"the ranks do not run ddpfix alike: {words}" in line


def test_another_version_is_told(ranks: Ranks) -> None:
    for lines, _ in ranks.run(two_versions, 2, STOCK).values:
        assert len(lines) == 1 and "ddpfix is 0.0.9 on rank 1, " in lines[0] and " on rank 0" in lines[0], lines


def two_versions(rank: int, world_size: int, mode: str) -> Any:
    import ddpfix
    from ddpfix import _join

    if rank == 1:
        _join.__version__ = "0.0.9"
    assert ddpfix.status()["patches"]
    return not_alike_here(rank)


def not_alike_here(rank: int) -> Any:
    lines = logged()
    training = Training(rank, (3, 3, 3))
    for x in training.loader:
        training.step(x)
    return [line for line in lines if "alike" in line], training.picture()
