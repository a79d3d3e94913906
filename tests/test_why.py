"""What the README says of stock ``join()``, and how ddpfix treats a script that calls it."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
from ranks import DDPFIX, STOCK, Ranks
from torch.nn.parallel import DistributedDataParallel as DDP


def _batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 4, generator=generator) for _ in range(count)]


def _model(*more: torch.nn.Module) -> DDP:
    torch.manual_seed(0)
    return DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), *more))


def _step(model: DDP, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().sum().backward()
    optimizer.step()


def join_around_each_forward(rank: int, world_size: int, mode: str) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in _batches(rank, 2 + rank):
        with model.join():
            output = model(batch)
        optimizer.zero_grad()
        output.square().sum().backward()
        optimizer.step()


def own_join_then_an_even_step(rank: int, world_size: int, mode: str) -> Any:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with model.join():
        for batch in _batches(rank, 2 + rank):
            _step(model, optimizer, batch)
    _step(model, optimizer, torch.ones(2, 4))
    return [p.detach().clone() for p in model.parameters()]


def own_join_then_rank_0_evaluates(rank: int, world_size: int, mode: str) -> Any:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for batch in _batches(rank, 2 + rank):
            _step(model, optimizer, batch)
    if rank == 0:
        with torch.no_grad():
            model(torch.ones(2, 4))
    dist.barrier()
    return [p.detach().clone() for p in model.parameters()]


def even_batch_norm(rank: int, world_size: int, mode: str, join: bool) -> Any:
    model = _model(torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(enable=join):
        for batch in _batches(rank, 3):
            _step(model, optimizer, batch)
    return [b.detach().clone() for b in model.buffers()]


def own_join_after_ambient(rank: int, world_size: int, mode: str) -> Any:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in _batches(rank, 2 + rank):
        _step(model, optimizer, batch)
    for _ in range(2):
        with model.join():
            for batch in _batches(rank, 3 - rank):
                _step(model, optimizer, batch)
    for batch in _batches(rank, 1 + 2 * rank):
        _step(model, optimizer, batch)
    dist.barrier()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("function", [join_around_each_forward])
def test_join_around_each_forward_deadlocks(ranks: Ranks, function: Callable[..., Any]) -> None:
    outcome = ranks.run(function, 2, STOCK, timeout=3)
    assert not outcome.finished


def test_stock_join_lets_adam_drift_apart(ranks: Ranks) -> None:
    first, second = ranks.run(own_join_then_an_even_step, 2, STOCK).values
    assert not all(map(torch.equal, first, second))


def test_stock_join_never_switches_itself_off_and_ddpfix_does_it(ranks: Ranks) -> None:
    assert not ranks.run(own_join_then_rank_0_evaluates, 2, STOCK, timeout=3).finished
    first, second = ranks.run(own_join_then_rank_0_evaluates, 2, DDPFIX).values
    assert all(map(torch.equal, first, second))


def test_stock_join_changes_batch_norm_on_even_inputs(ranks: Ranks) -> None:
    without, within = (ranks.run(even_batch_norm, 2, STOCK, join).values[1] for join in (False, True))
    assert not all(map(torch.equal, without, within))


def test_an_own_join_means_what_it_means_today(ranks: Ranks) -> None:
    stock = ranks.run(own_join_then_an_even_step, 2, STOCK).values
    ours = ranks.run(own_join_then_an_even_step, 2, DDPFIX).values
    for there, here in zip(stock, ours):
        assert all(map(torch.equal, there, here))


def test_an_own_join_between_ambient_loops(ranks: Ranks) -> None:
    assert not ranks.run(own_join_after_ambient, 2, STOCK, timeout=3).finished
    first, second = ranks.run(own_join_after_ambient, 2, DDPFIX).values
    assert all(map(torch.equal, first, second))
