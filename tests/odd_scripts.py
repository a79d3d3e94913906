"""Scripts in which it is hard to tell who is still in a loop; each was once told wrongly. What the two ranks return is known."""

from __future__ import annotations

import copy
import multiprocessing
from typing import Any, Callable

import torch
import torch.distributed as dist
from ranks import logged
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import ddpfix


class Training:
    def __init__(self, rank: int, norm: bool = False) -> None:
        torch.manual_seed(0)
        self.rank = rank
        layers: list[torch.nn.Module] = [torch.nn.Linear(4, 2), *([torch.nn.BatchNorm1d(2)] if norm else [])]
        self.model = DDP(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loader(self, *counts: int) -> Any:
        return DataLoader(torch.randn(2 * counts[self.rank], 4), batch_size=2)  # type: ignore[arg-type]

    def step(self, x: torch.Tensor, synchronise: bool = True) -> None:
        if not synchronise:
            with self.model.no_sync():
                self.model(x).square().sum().backward()
            return
        self.model(x).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def total(value: float = 1.0) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


#: name -> function of the rank, and what ranks 0 and 1 return.
SCRIPTS: dict[str, tuple[Callable[[int], Any], list[Any]]] = {}


def returns(*expected: Any) -> Callable[[Callable[[int], Any]], Callable[[int], Any]]:
    def enter(function: Callable[[int], Any]) -> Callable[[int], Any]:
        SCRIPTS[function.__name__] = (function, list(expected))
        return function

    return enter


def run(rank: int, world_size: int, mode: str, name: str) -> Any:
    return SCRIPTS[name][0](rank)


@returns([2.0, 2.0], [2.0, 2.0])
def a_sum_of_a_rank_that_has_trained_nothing_yet(rank: int) -> Any:
    training, sums = Training(rank), []
    for counts in ((0, 2), (1, 3)):
        for i, x in enumerate(training.loader(*counts)):
            training.step(x)
            if i == 1:
                break
        sums.append(total())
    return sums


@returns(([2.0, 2.0], 20.0), ([2.0, 2.0, 1.0, 1.0], 20.0))
def a_loop_over_a_list_after_one_over_a_loader(rank: int) -> Any:
    training, ones = Training(rank), []
    for x in training.loader(2, 2):
        training.step(x)
    for x in list(training.loader(2, 4)):
        training.step(x)
        ones.append(total())
    return ones, total(10.0)


@returns(([2.0], 20.0), ([2.0, 1.0, 1.0], 20.0))
def a_loop_over_a_list_of_one_batch(rank: int) -> Any:
    training, ones = Training(rank), []
    for x in list(training.loader(1, 3)):
        training.step(x)
        ones.append(total())
    return ones, total(10.0)


@returns(([], 20.0), ([1.0], 20.0))
def a_place_that_a_rank_without_batches_has_never_seen(rank: int) -> Any:
    training, ones = Training(rank), []
    for x in list(training.loader(0, 1)):
        training.step(x)
        ones.append(total())
    return ones, total(10.0)


@returns(20.0, 20.0)
def the_last_of_a_sized_loader_that_is_counted(rank: int) -> Any:
    training = Training(rank)
    loader = training.loader(3, 6)
    iterator = iter(loader)
    for i in range(len(loader)):
        training.step(next(iterator))
        if i == 4:
            assert total() == 1.0
    return total(10.0)


@returns(20.0, 20.0)
def validation_within_a_loop_over_a_list(rank: int) -> Any:
    training = Training(rank)

    def validate() -> float:
        for _ in training.loader(2, 2):
            pass
        return total()

    for _ in range(2):
        for i, x in enumerate(list(training.loader(3, 6))):
            training.step(x)
            if i == 4:
                assert validate() == 1.0
        ten = total(10.0)
        assert validate() == 2.0
    return ten


@returns([[0, 1]] * 3, [[0, 1]] * 3)
def passes_of_different_length_with_an_object_gather(rank: int) -> Any:
    """This one runs today."""
    training, gathered, step = Training(rank), [], 0
    while step < 12:
        for x in training.loader(3, 6):
            training.step(x)
            step += 1
            if step % 4 == 0:
                ranks: list[Any] = [None, None]
                dist.all_gather_object(ranks, rank)
                gathered.append(ranks)
            if step >= 12:
                break
    return gathered


@returns((2, 1), (3, 2))
def a_parameter_of_the_ranks_own_in_the_same_optimizer(rank: int) -> Any:
    training = Training(rank)
    own = torch.nn.Parameter(torch.ones(1 + rank))
    optimizer = torch.optim.Adam([*training.model.parameters(), own], lr=0.25)
    for i, x in enumerate(training.loader(2, 3)):
        training.model(x).square().sum().backward()
        own.grad = torch.ones_like(own) if i < 1 + rank else torch.zeros_like(own)
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[own]
    return int(state["step"]), len(state["exp_avg"])


@returns(([], 20.0), ([1.0, 1.0], 20.0))
def a_call_before_the_first_step(rank: int) -> Any:
    training, ones = Training(rank), []
    for x in training.loader(0, 2):
        ones.append(total())
        training.step(x)
    return ones, total(10.0)


@returns(["from 0"], ["from 0"] * 3)
def a_broadcast_before_the_first_step(rank: int) -> Any:
    training, got = Training(rank), []
    for x in training.loader(1, 3):
        objects = [f"from {rank}"]
        dist.broadcast_object_list(objects, 0)
        got.append(objects[0])
        training.step(x)
    return got


@returns(([], 20.0), ([1.0] * 3, 20.0))
def calls_before_the_first_synchronised_step(rank: int) -> Any:
    training, ones = Training(rank), []
    for i, x in enumerate(training.loader(0, 4)):
        if i:
            ones.append(total())
        training.step(x, synchronise=i % 2 == 1)
    return ones, total(10.0)


@returns(([2.0, 2.0], 20.0), ([2.0, 1.0, 1.0, 1.0] * 2, 20.0))
def a_loop_shorter_than_a_window_of_accumulation(rank: int) -> Any:
    training, ones = Training(rank), []
    for _ in range(2):
        for i, x in enumerate(training.loader(1, 4)):
            ones.append(total())
            training.step(x, synchronise=i % 2 == 1)
    return ones, total(10.0)


@returns(([2.0, 2.0], 20.0), ([2.0, 2.0, 1.0, 1.0], 20.0))
def an_evaluation_with_buffers_behind_a_loop_by_next(rank: int) -> Any:
    training, ones = Training(rank, norm=True), []
    iterator = iter(training.loader(2, 4))
    while (x := next(iterator, None)) is not None:
        training.step(x)
        ones.append(total())
    training.model.eval()
    with torch.no_grad():
        training.model(torch.ones(2, 4))
    return ones, total(10.0)


@returns([2.0] * 3, [2.0] * 3)
def passes_of_different_length_with_a_call_every_second_step(rank: int) -> Any:
    """This one runs today."""
    training, ones, step = Training(rank), [], 0
    loader = training.loader(5, 4)
    while step < 6:
        for x in loader:
            training.step(x)
            step += 1
            if step % 2 == 0:
                ones.append(total())
            dist.all_reduce(torch.zeros(2))
            if step == 6:
                break
    return ones


@returns(([2.0] * 2, [2.0] * 3), ([2.0] * 2 + [1.0] * 2, [2.0] * 3))
def calls_before_the_step_behind_next_that_fit_no_other(rank: int) -> Any:
    training, ones = Training(rank), []
    for x in training.loader(1, 1):
        training.step(x)
    iterator = iter(training.loader(2, 4))
    while (x := next(iterator, None)) is not None:
        ones.append(total())
        training.step(x)
    sums = torch.ones(3)
    dist.all_reduce(sums)
    return ones, sums.tolist()


@returns(2, 0)
def a_rank_without_a_batch_behind_next(rank: int) -> Any:
    training, steps = Training(rank), 0
    for x in training.loader(2, 2):
        training.step(x)
    iterator = iter(training.loader(2, 0))
    while (x := next(iterator, None)) is not None:
        training.step(x)
        steps += 1
    return steps


@returns(([], 2.0), (["ddpfix: rank 1 waits in all_reduce(float32[1], SUM) at odd_scripts.py"], 2.0))
def a_sum_that_one_rank_calls(rank: int) -> Any:
    """A fault of the script, on which it hangs without ddpfix; it is not told from uneven inputs of another kind, but named."""
    training, lines = Training(rank), logged()
    for epoch in range(2):
        for i, x in enumerate(training.loader(5, 5)):
            if rank == 1 and epoch == 1 and i == 2:
                total()
            training.step(x)
    everything = total()
    return [line[len("WARNING: ") :].rpartition(":")[0] for line in lines if line.startswith("WARNING: ")], everything


def _evaluates_copies(training: Training) -> None:
    """By rank 0 alone: a copy on which the constructor was never called, with gradients, here and in a forked child."""
    if training.rank == 0:
        twin = copy.deepcopy(training.model).eval()
        twin(torch.zeros(1, 4))
        child = multiprocessing.get_context("fork").Process(target=twin, args=(torch.zeros(1, 4),))
        child.start()
        child.join()
        assert child.exitcode == 0


@returns((3, 2, 2.0), (5, 0, 2.0))
def a_copy_that_one_rank_evaluates(rank: int) -> Any:
    first = Training(rank)
    for x in first.loader(2, 2):
        first.step(x)
    _evaluates_copies(first)
    second = Training(rank)
    for x in second.loader(3, 5):
        second.step(x)
    return *_steps(), total()


@returns((3, 2, 2.0), (5, 0, 2.0))
def a_copy_that_all_train(rank: int) -> Any:
    training = Training(rank)
    _evaluates_copies(training)
    training.model = copy.deepcopy(training.model)
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    # The first step of all ranks makes it known.
    for counts in ((1, 1), (2, 4)):
        for x in training.loader(*counts):
            training.step(x)
    return *_steps(), total()


def _steps() -> tuple[int, int]:
    """Of the model made last: trained, and shadowed."""
    (group,) = ddpfix.status()["join_details"]["process_groups"]  # type: ignore[index,call-overload]
    last = group["models"][-1]
    return last["steps_trained"], last["steps_shadowed"]
