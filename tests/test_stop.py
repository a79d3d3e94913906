"""Models that need all ranks within a step: the training loops of all ranks end with the first that runs out of batches."""

from __future__ import annotations

from typing import Any

import communicating as scripts
import pytest
import torch
from compare import difference
from ranks import DDPFIX, HANG_TIMEOUT, STOCK, Ranks

EVEN, UNEVEN = (4, 4, 4), (3, 5, 4)


def told(kind: str) -> dict[str, str]:
    """A plain model stops only where it is told to."""
    return {"DDPFIX_UNEVEN": "stop"} if kind == "plain" else {}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("way", scripts.WAYS)
def test_all_ranks_make_as_many_steps_as_the_shortest(ranks: Ranks, way: str, world: int) -> None:
    counts = UNEVEN[:world]
    values = ranks.run(scripts.trains, world, DDPFIX, counts, way).values
    expected = scripts.one_process(counts)
    for value in values:
        assert value["steps"] == [(3, 3.0 * world)] * 2
        assert value["sums"] == pytest.approx([sum(losses) for losses in zip(*(v["losses"] for v in values))])
        assert difference(values[0]["parameters"], value["parameters"]) is None
        found = difference(expected, value["parameters"], close=True)
        assert found is None, found


@pytest.mark.parametrize("way", scripts.WAYS)
def test_without_ddpfix_it_does_not_finish(ranks: Ranks, way: str) -> None:
    assert not ranks.run(scripts.trains, 2, STOCK, UNEVEN, way, timeout=HANG_TIMEOUT).finished


def test_when_all_are_told_to_join_it_is_refused(ranks: Ranks) -> None:
    outcome = ranks.run(scripts.trains, 2, DDPFIX, UNEVEN, environment={"DDPFIX_UNEVEN": "join"})
    for rank in outcome.ranks:
        assert rank.error is not None, outcome.report()
        assert "CollectiveMismatchError" in rank.error and "without DDPFIX_UNEVEN=join the ranks end together" in rank.error
        assert rank.error.rstrip().endswith("same number of batches.")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["function", "buffers", "gather", "plain"])
@pytest.mark.parametrize("way", scripts.WAYS)
def test_even_is_stock_to_the_bit(ranks: Ranks, way: str, kind: str, world: int) -> None:
    without = ranks.run(scripts.trains, world, STOCK, EVEN, way, kind).values
    with_it = ranks.run(scripts.trains, world, DDPFIX, EVEN, way, kind, environment=told(kind)).values
    found = difference(without, with_it)
    assert found is None, found


RUN = (
    scripts.restarts,
    scripts.cycles,
    scripts.a_generator_restarts,
    scripts.accumulates_endlessly,
    scripts.goes_on_with_dummies,
    scripts.makes_up_what_is_missing,
    scripts.skips,
    scripts.passes,
    scripts.feeds_a_list,
    scripts.looks_alone,
    scripts.looks_alone_first,
    scripts.looks_while_others_wait_elsewhere,
    scripts.leaves_the_model_in_evaluation,
    scripts.evaluates_in_a_thread,
)
#: Those that finish today with even inputs only.
RUN_EVEN = RUN[RUN.index(scripts.feeds_a_list) :]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["function", "buffers", "plain"])
@pytest.mark.parametrize("script", RUN, ids=lambda script: script.__name__)
def test_what_runs_today_is_stock_to_the_bit(ranks: Ranks, script: Any, kind: str, world: int) -> None:
    if script in RUN_EVEN:
        counts: tuple[int, ...] = (4, 4, 4)
    else:
        counts = (3, 5, 5) if script is scripts.skips else (3, 5) if world == 2 else (4, 2, 6)
    without = ranks.run(script, world, STOCK, counts, kind).values
    with_it = ranks.run(script, world, DDPFIX, counts, kind, environment=told(kind)).values
    found = difference(without, with_it)
    assert found is None, found


def test_a_rank_that_needs_nobody_within_a_step(ranks: Ranks) -> None:
    """Only the others stop for each other; with even inputs nobody notices."""
    without, with_it = (ranks.run(scripts.trains, 3, mode, EVEN, "plain", "pairs").values for mode in (STOCK, DDPFIX))
    found = difference(without, with_it)
    assert found is None, found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("way", scripts.WAYS)
def test_models_with_buffers_stop_too(ranks: Ranks, way: str, world: int) -> None:
    values = ranks.run(scripts.trains, world, DDPFIX, UNEVEN[:world], way, "buffers").values
    for value in values:
        assert value["steps"] == [(3, 3.0 * world)] * 2
        # Those of batch norm itself are the rank's own after its last step, as in stock.
        assert difference(values[0]["parameters"][:-3], value["parameters"][:-3]) is None


def test_gathers_in_forward_stop_all(ranks: Ranks) -> None:
    values = ranks.run(scripts.trains, 2, DDPFIX, UNEVEN, "plain", "gather").values
    assert [value["steps"] for value in values] == [[(3, 6.0)] * 2] * 2
    # A buffer that has seen what all ranks looked at.
    seen = sum(torch.stack(scripts.samples(rank, UNEVEN[rank])[:6]).abs().sum(0) for rank in range(2)) * 2  # type: ignore[call-overload]
    for value in values:
        assert torch.allclose(value["parameters"][-1], seen)


def test_any_model_can_be_told_to_stop(ranks: Ranks) -> None:
    for uneven, steps in (("stop", [(3, 6.0)] * 2), ("auto", None)):
        values = ranks.run(scripts.trains, 2, DDPFIX, UNEVEN, "plain", "plain", environment={"DDPFIX_UNEVEN": uneven}).values
        assert difference(values[0]["parameters"], values[1]["parameters"]) is None
        assert [value["steps"] for value in values] == ([steps] * 2 if steps else [[(3, 8.0)] * 2, [(5, 8.0)] * 2])


@pytest.mark.parametrize("script", [(scripts.trains, (0, 3)), (scripts.feeds_a_list, (2, 4))], ids=["no batch at all", "a list"])
def test_where_nobody_can_be_stopped_all_ranks_raise(ranks: Ranks, script: Any) -> None:
    function, counts = script
    outcome = ranks.run(function, 2, DDPFIX, counts)
    for rank in outcome.ranks:
        # A rank that is leaving has nothing more to do, and says so in the log.
        assert "CollectiveMismatchError" in (rank.error or "") or rank.finished and "part of a model's forward" in rank.output, outcome.report()
    assert not outcome.finished


def test_an_epoch_without_a_batch_on_one_rank(ranks: Ranks) -> None:
    values = ranks.run(scripts.an_empty_epoch, 2, DDPFIX).values
    assert [value["steps"] for value in values] == [[3, 0, 3]] * 2
    assert difference(values[0]["parameters"], values[1]["parameters"]) is None


@pytest.mark.parametrize("unsized", [False, True])
def test_what_is_dropped_is_told_once_an_epoch(ranks: Ranks, unsized: bool) -> None:
    first, second = ranks.run(scripts.what_the_log_says, 2, DDPFIX, UNEVEN, unsized).values
    assert len(first) == 3 and len(second) == 1, (first, second)
    assert first[0].startswith("INFO: ddpfix: rank 0: a model that communicates in its forward or backward (at communicating.py:")
    for line in first[1:]:
        assert line.startswith("WARNING: ddpfix: uneven inputs: the training loops of all ranks ended together, as rank 0 ended its training loop")
        assert "and a model that communicates in its forward or backward (at communicating.py:" in line
        assert line.endswith("rank by rank: 0, at least 1" if unsized else "rank by rank: 0, 2"), line


def test_the_cost(ranks: Ranks) -> None:
    """One vote before each batch, one in each forward and one in each backward, and one at the end of the loop."""
    without, with_it = (ranks.run(scripts.counts_collectives, 2, mode, "function").values[0] for mode in (STOCK, DDPFIX))
    assert [ours - stock for stock, ours in zip(without[1:], with_it[1:])] == [6 * 3 + 1, 3 * 3 + 1]
    plain_without, plain = (ranks.run(scripts.counts_collectives, 2, mode, "plain").values[0] for mode in (STOCK, DDPFIX))
    assert [ours - stock for stock, ours in zip(plain_without[1:], plain[1:])] == [6 + 1, 3 + 1]


def test_synchronised_batch_norm_is_known_by_its_class(ranks: Ranks) -> None:
    # Stock DDP takes it on a GPU only, so that none can be trained here.
    assert ranks.run(finds_synchronised_batch_norm, 2, DDPFIX).values == [(True, False)] * 2


def finds_synchronised_batch_norm(rank: int, world_size: int, mode: str) -> tuple[bool, bool]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    from ddpfix import _join

    DDP._passing_sync_batchnorm_handle = lambda self, module: None  # type: ignore[method-assign]
    found = []
    for layer in (torch.nn.SyncBatchNorm(4), torch.nn.BatchNorm1d(4)):
        group = dist.new_group()
        DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), layer), process_group=group)
        found.append(_join._state.meetings[group][0].stops_together)
    return found[0], found[1]
