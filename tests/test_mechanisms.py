"""With any one mechanism of the ambient join switched off, an uneven job goes wrong; with all of them on, it does not."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
from ranks import DDPFIX, STOCK, Ranks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


def train(rank: int, world_size: int, mode: str, from_list: bool = False, barrier: bool = False, norm: bool = False) -> Any:
    """Two epochs of 2 and 4 batches with Adam; returns what the rank sees right after the last loop, and one even step later."""
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4) if norm else torch.nn.ReLU()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    samples = list(torch.randn(4 + 4 * rank, 4, generator=torch.Generator().manual_seed(rank)))
    batches = [torch.stack(samples[i : i + 2]) for i in range(0, len(samples), 2)]

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(batch) * 1.5 + 1).square().sum().backward()
        optimizer.step()

    def picture() -> list[torch.Tensor]:
        tensors = [*model.module.parameters(), *model.module.buffers()]
        return [t.detach().clone() for t in tensors]

    for _ in range(2):
        for batch in batches if from_list else DataLoader(samples, batch_size=2):
            step(batch)
            if barrier:
                dist.barrier()
    after_the_loop = picture()
    if from_list:
        return lambda: (picture(), None)  # called when the process group has been left
    step(torch.ones(2, 4))
    return after_the_loop, picture()


def rank_0_looks_at_its_training_data(rank: int, world_size: int, mode: str) -> Any:
    """A pass over the training loader on one rank, between even epochs."""
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = DataLoader(list(torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))), batch_size=2)
    seen = []
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
        if rank == 0:
            for batch in loader:
                with torch.no_grad():
                    seen.append(model(batch).sum().item())
    return seen, [p.detach().clone() for p in model.parameters()]


def test_a_pass_without_training_is_no_training_loop(ranks: Ranks) -> None:
    for stock, ours in zip(*(ranks.run(rank_0_looks_at_its_training_data, 2, mode).values for mode in (STOCK, DDPFIX))):
        assert ours[0] == stock[0] and all(map(torch.equal, ours[1], stock[1]))


def same(values: list[Any]) -> list[bool]:
    """Whether the ranks are equal after the loop, and one even step later."""
    first, second = values
    return [a is None or all(map(torch.equal, a, b)) for a, b in zip(first, second)]


# Each is called in the rank, before the process group is made.


def no_vote() -> None:
    from ddpfix import _vote

    _vote.Rendezvous.live = property(lambda self: False)  # type: ignore[assignment,method-assign]


def no_shadow() -> None:
    from ddpfix import _shadow

    _shadow.Shadow.shadow_backward = lambda self: None  # type: ignore[method-assign]


def no_shadow_of_buffers() -> None:
    from ddpfix import _shadow

    _shadow.Shadow.shadow_forward = lambda self, forward, source: None  # type: ignore[method-assign]


def no_catching_up() -> None:
    from ddpfix import _catch_up

    _catch_up.catch_up = lambda *arguments: None  # type: ignore[assignment]


def no_catching_up_of_optimizers() -> None:
    from ddpfix import _catch_up

    _catch_up._copy_training_state = lambda *arguments: None  # type: ignore[assignment]


def no_loop_end() -> None:
    from ddpfix import _loop

    _loop.Loops.exhausted = lambda self, iterator, frame: set()  # type: ignore[method-assign]


def no_leaving() -> None:
    from ddpfix import _leave

    _leave.Departure.leave = lambda self: None  # type: ignore[method-assign]


@pytest.mark.parametrize("arguments", [(), (True,), (False, True), (False, False, True)], ids=["plain", "list", "barrier", "norm"])
def test_with_all_mechanisms_on(ranks: Ranks, arguments: tuple[bool, ...]) -> None:
    outcome = ranks.run(train, 2, DDPFIX, *arguments)
    # Batch norm buffers of the even step are each rank's own, as in stock, until the next forward.
    assert same(outcome.values)[:1] == [True]
    if arguments != (False, False, True):
        assert same(outcome.values) == [True, True]


@pytest.mark.parametrize(
    ("off", "arguments"),
    [
        (no_vote, ()),
        (no_shadow, ()),
        (no_shadow_of_buffers, (False, False, True)),
        (no_catching_up, ()),
        (no_loop_end, ()),
        (no_leaving, (True,)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_without_it_the_job_fails_or_ranks_differ(ranks: Ranks, off: Callable[[], None], arguments: tuple[bool, ...]) -> None:
    outcome = ranks.run(train, 2, DDPFIX, *arguments, timeout=4, hard_limit=15, prepare=f"test_mechanisms:{off.__name__}")
    assert not outcome.finished or not same(outcome.values)[0]


def test_without_the_optimizer_ranks_differ_one_even_step_later(ranks: Ranks) -> None:
    outcome = ranks.run(train, 2, DDPFIX, prepare="test_mechanisms:no_catching_up_of_optimizers")
    assert same(outcome.values) == [True, False]
