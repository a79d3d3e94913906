"""Collectives of the script: pairing as in stock while all train, neutral elements afterwards, one error where nothing honest exists."""

from __future__ import annotations

import functools
import operator
from typing import Any

import collectives_of_scripts as scripts
import odd_scripts
import pytest
import torch
from compare import difference
from ranks import DDPFIX, HANG_TIMEOUT, STOCK, Outcome, Ranks

EVEN, UNEVEN = (4, 4, 4), (3, 5, 4)
#: Each is seen to fail on uneven inputs without ddpfix.
HANG = (
    scripts.loss_each_step,
    scripts.tokens_before_each_step,
    scripts.one_function_for_all,
    scripts.loop_over_a_list,
    scripts.look_ahead,
    scripts.logs_in_forward,
    scripts.evaluation_with_metrics,
    scripts.rank_0_first,
    scripts.flag_from_rank_0,
    scripts.every_reduction,
    scripts.every_other,
)
#: These run today.
RUN = (scripts.espnet, scripts.stops_when_all_have)


def stock(ranks: Ranks, script: Any, *arguments: Any, hang: bool = False, world: int = 2) -> Outcome:
    return ranks.run(script, world, STOCK, *arguments, timeout=HANG_TIMEOUT if hang else None)


def ours(ranks: Ranks, script: Any, *arguments: Any, world: int = 2, **options: Any) -> list[Any]:
    return ranks.run(script, world, DDPFIX, *arguments, **options).values


def assert_equal_ranks(values: list[Any]) -> None:
    for value in values[1:]:
        found = difference(values[0]["parameters"], value["parameters"])
        assert found is None, found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("script", [*HANG, *RUN], ids=lambda script: script.__name__)
def test_even_is_stock_to_the_bit(ranks: Ranks, script: Any, world: int) -> None:
    found = difference(stock(ranks, script, EVEN, world=world).values, ours(ranks, script, EVEN, world=world))
    assert found is None, found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("script", RUN, ids=lambda script: script.__name__)
def test_uneven_that_runs_today_is_stock_to_the_bit(ranks: Ranks, script: Any, world: int) -> None:
    found = difference(stock(ranks, script, UNEVEN, world=world).values, ours(ranks, script, UNEVEN, world=world))
    assert found is None, found


@pytest.mark.parametrize("script", HANG, ids=lambda script: script.__name__)
def test_uneven_fails_on_stock(ranks: Ranks, script: Any) -> None:
    assert not stock(ranks, script, UNEVEN, hang=True).finished


@pytest.mark.parametrize("world", [2, 3])
def test_loss_each_step(ranks: Ranks, world: int) -> None:
    values = ours(ranks, scripts.loss_each_step, UNEVEN, world=world)
    assert_equal_ranks(values)
    own = [value["own"] for value in values]
    for rank, value in enumerate(values):
        expected = []
        for epoch in range(2):
            losses = [own[r][epoch * n : (epoch + 1) * n] for r, n in enumerate(UNEVEN[:world])]
            for step in range(UNEVEN[rank]):
                # In the extra steps, the sum is over those that remain.
                expected.append(sum(loss[step] for loss in losses if step < len(loss)))
            mean = value["means"][epoch]
            assert mean == pytest.approx([sum(map(sum, losses)), sum(UNEVEN[:world])])
        assert value["sums"] == pytest.approx(expected)
    without = ours(ranks, scripts.loss_each_step, UNEVEN, False, world=world)
    found = difference([value["parameters"] for value in values], [value["parameters"] for value in without])
    assert found is None, f"the metric has changed the parameters: {found}"


@pytest.mark.parametrize("world", [2, 3])
def test_tokens_before_each_step(ranks: Ranks, world: int) -> None:
    values = ours(ranks, scripts.tokens_before_each_step, UNEVEN, world=world)
    assert_equal_ranks(values)
    for rank, value in enumerate(values):
        assert value["numbers"] == [sum(step < n for n in UNEVEN[:world]) for step in range(UNEVEN[rank])] * 2
        assert value["means"] == values[0]["means"]


def test_a_doubtful_pairing_is_told(ranks: Ranks) -> None:
    outcome = ranks.run(scripts.tokens_in_a_loop_with_a_way_out, 2, DDPFIX, UNEVEN)
    assert "rank 0 had ended its training loop when its collective at collectives_of_scripts.py:" in outcome.ranks[0].output
    for even in (EVEN, (3, 3, 3)):
        assert all("had ended" not in rank.output for rank in ranks.run(scripts.tokens_in_a_loop_with_a_way_out, 2, DDPFIX, even).ranks)
    assert "had ended" not in ranks.run(scripts.espnet, 2, DDPFIX, UNEVEN).ranks[0].output


@pytest.mark.parametrize("script", [scripts.one_function_for_all, scripts.loop_over_a_list, scripts.look_ahead], ids=lambda s: s.__name__)
@pytest.mark.parametrize("world", [2, 3])
def test_one_function_for_all(ranks: Ranks, script: Any, world: int) -> None:
    values = ours(ranks, script, UNEVEN, world=world, end="exit")
    for rank, value in enumerate(values):
        assert len(value["averages"]) == 2 * UNEVEN[rank]
        # The number of batches of all ranks, over the number of ranks.
        assert value["means"] == pytest.approx([sum(UNEVEN[:world]) / world] * 2)
    assert_equal_ranks(values)


@pytest.mark.parametrize("world", [2, 3])
def test_logs_in_forward(ranks: Ranks, world: int) -> None:
    values = ours(ranks, scripts.logs_in_forward, UNEVEN, world=world)
    assert_equal_ranks(values)
    for rank, value in enumerate(values):
        assert value["rows"] == [sum(UNEVEN[:world])] * 2
        # A buffer that counts samples has caught up with those of the steps that were shadowed. (After the last epoch, there is no
        # meeting that a rank with a sum of all ranks was behind at.)
        assert value["seen"] == 2 * 2 * sum(UNEVEN[:world]), rank
        assert len(value["logged"]) == 2 * UNEVEN[rank]
    longest = values[1]["logged"]
    assert longest[4] != longest[3] and all(number == number for number in longest)


def test_what_is_part_of_the_model_passes(ranks: Ranks) -> None:
    without, with_it = stock(ranks, scripts.communicates_in_forward, EVEN).values, ours(ranks, scripts.communicates_in_forward, EVEN)
    for stock_value, value in zip(without, with_it):
        # A vote in each backward, one in each forward (before the bucket rebuild, or before the first of the model's own collectives),
        # one before each batch from the second on, and one at the end of the loop.
        assert value.pop("collectives") == stock_value.pop("collectives") + 4 + 4 + 3 + 1
    found = difference(without, with_it)
    assert found is None, found


@pytest.mark.parametrize("world", [2, 3])
def test_evaluation_with_metrics(ranks: Ranks, world: int) -> None:
    values = ours(ranks, scripts.evaluation_with_metrics, UNEVEN, world=world)
    assert_equal_ranks(values)
    for value in values:
        assert difference(values[0]["found"], value["found"]) is None
    assert values[0]["found"][1] == [{"rank": r, "batches": UNEVEN[r]} for r in range(world)]


@pytest.mark.parametrize("world", [2, 3])
def test_rank_0_first(ranks: Ranks, world: int) -> None:
    values = ours(ranks, scripts.rank_0_first, UNEVEN, world=world)
    assert_equal_ranks(values)
    for value in values:
        assert difference(values[0]["order"], value["order"]) is None


@pytest.mark.parametrize("objects", [False, True], ids=["tensor", "object"])
@pytest.mark.parametrize("world", [2, 3])
def test_flag_from_rank_0(ranks: Ranks, world: int, objects: bool) -> None:
    outcome = ranks.run(scripts.flag_from_rank_0, world, DDPFIX, UNEVEN, objects)
    assert_equal_ranks(outcome.values)
    for rank, value in enumerate(outcome.values):
        assert value["flags"] == [{"stop": False, "from": 0} if objects else 10] * (2 * UNEVEN[rank])
    # It is said once, by the rank that does it.
    assert outcome.ranks[0].output.count("it contributes what it last sent from there") == 1, outcome.ranks[0].output
    assert "contributes" not in outcome.ranks[1].output


def test_neutral_elements(ranks: Ranks) -> None:
    """In the last steps rank 1 is alone: what it gets back is what it put in."""
    alone = ours(ranks, scripts.every_reduction, UNEVEN)[1]["results"]
    names = [name for name, what in alone if what == "all"]
    reduced = [name for name in names if not isinstance(alone[name, "all"], str)]
    assert len(reduced) > 30 and "MIN torch.uint8" in reduced and "MAX torch.int8" in reduced and "SUM complex" in reduced, reduced
    for name in reduced:
        assert torch.equal(alone[name, "all"], alone[name, "own"]), (name, alone[name, "all"])


def test_neutral_elements_of_every_dtype() -> None:
    """Those that gloo does not reduce, too: by the operators themselves."""
    from ddpfix._collectives import _NEUTRAL

    operators: dict[str, Any] = {
        "SUM": operator.add,
        "AVG": operator.add,
        "PRODUCT": operator.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": operator.and_,
        "BOR": operator.or_,
        "BXOR": operator.xor,
    }
    assert set(operators) == set(_NEUTRAL)
    bits = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    numbers = [*bits, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for name, apply in operators.items():
        complexes = [torch.complex64] if name in ("SUM", "AVG", "PRODUCT") else []
        for dtype in [*(bits if name.startswith("B") else numbers), *complexes]:
            value = torch.tensor([0, 1, 3, 120]).to(dtype)
            neutral = torch.full((4,), _NEUTRAL[name](dtype), dtype=dtype)
            assert torch.equal(apply(value, neutral).to(dtype), value), (name, dtype)


@pytest.mark.parametrize("world", [2, 3])
def test_the_other_kinds(ranks: Ranks, world: int) -> None:
    values = ours(ranks, scripts.every_other, UNEVEN, world=world)
    assert_equal_ranks(values)
    for rank, value in enumerate(values):
        for step, row in enumerate(value["rows"]):
            there = [r for r in range(world) if step < UNEVEN[r]]
            assert row["asynchronous"] == (sum(1.0 + r for r in there), True)
            assert row["another group of all ranks"] == sum(1.0 + r for r in there)
            for root in (0, world - 1):
                assert row[f"reduce to {root}"] == (sum(1.0 + r for r in there) if rank == root else None)
            sizes = [1 if r in there else 0 for r in range(world)]
            assert row["sizes"] == row["sizes into a tensor"] == sizes
            assert row["a floating number"] == [1.5 if r in there else 0.0 for r in range(world)]
            assert row["reduce_scatter"] == row["reduce_scatter_tensor"] == (rank + 1) * len(there)
            if 1 in there:
                assert row["scatter"] == [rank, rank] and row["scatter objects"] == [f"for {rank}"]


@pytest.mark.parametrize("which", scripts.DISHONEST)
def test_where_no_honest_value_exists_all_ranks_raise(ranks: Ranks, which: str) -> None:
    outcome = ranks.run(scripts.dishonest, 2, DDPFIX, (3, 5), which)
    for number, rank in enumerate(outcome.ranks):
        assert rank.error is not None, outcome.report()
        last = rank.error.strip().splitlines()[-1]
        assert last.startswith(f"ddpfix.CollectiveMismatchError: ddpfix: rank {number}: rank 0 ended its training loop at collectives_of_"), last
        assert "rank 1 calls" in last and last.count("collectives_of_scripts.py:") == 2, last
        assert "During handling of the above exception" not in rank.error
    even = ours(ranks, scripts.dishonest, (3, 3), which)
    assert len(even) == 2


@pytest.mark.parametrize("name", odd_scripts.SCRIPTS)
def test_who_is_still_in_a_loop(ranks: Ranks, name: str) -> None:
    values = ours(ranks, odd_scripts.run, name)
    assert values == odd_scripts.SCRIPTS[name][1]


@pytest.mark.parametrize("which", ["another function", "another size", "another type", "another operator", "a barrier", "an asynchronous one"])
def test_a_wrong_collective_is_named_on_all_ranks(ranks: Ranks, which: str) -> None:
    outcome = ranks.run(scripts.wrong_collective, 2, DDPFIX, which)
    for rank in outcome.ranks:
        assert rank.error is not None, outcome.report()
        last = rank.error.strip().splitlines()[-1]
        assert "CollectiveMismatchError" in last and "rank 0 calls all_reduce" in last and "rank 1 calls" in last, last


def test_a_wrong_collective_hangs_without_ddpfix(ranks: Ranks) -> None:
    assert not stock(ranks, scripts.wrong_collective, "another function", hang=True).finished


def test_a_long_wait_is_told(ranks: Ranks) -> None:
    first, second = ours(ranks, scripts.waits, environment={"DDPFIX_WATCH": "1"})
    (line,) = first["lines"]
    assert line.startswith("ddpfix: rank 0 has been waiting for ")
    assert "rank 0 ended its training loop at collectives_of_scripts.py:" in line
    assert "rank 1 is in all_reduce(float32[1], SUM) at collectives_of_scripts.py:" in line and "and is now at collectives_of_scripts" in line
    assert second["lines"] == []


def test_how_uneven_it_was_is_told(ranks: Ranks) -> None:
    first, second = ours(ranks, scripts.counted)
    assert second["lines"] == []
    assert len(first["lines"]) == 2
    for line in first["lines"]:
        assert "steps trained [2, 5], steps of others shadowed [3, 0]" in line, line
    assert first["details"]["models"] == [{"steps_trained": 4, "steps_shadowed": 6}]
    assert second["details"]["models"] == [{"steps_trained": 10, "steps_shadowed": 0}]
    assert first["details"]["seconds_shadowing"] > 0.0 == second["details"]["seconds_shadowing"]


def test_what_is_none_of_ours_passes(ranks: Ranks) -> None:
    found = difference(stock(ranks, scripts.other_threads_and_coalescing).values, ours(ranks, scripts.other_threads_and_coalescing))
    assert found is None, found


def test_every_collective_of_this_torch_is_in_the_table() -> None:
    from torch.distributed import distributed_c10d

    from ddpfix._collectives import COLLECTIVES

    none = {"is_", "get_", "supports_", "default_", "record_", "init_", "destroy_", "send", "recv", "isend", "irecv", "batch_", "new_subgroups"}
    others = {"monitored_barrier", "shrink_group", "reduce_op", "group"}
    functions = [name for name in distributed_c10d.__all__ if name[0].islower() and callable(getattr(distributed_c10d, name))]
    missing = [name for name in functions if name not in COLLECTIVES and not name.startswith(tuple(none)) and name not in others]
    assert missing == []
    assert functools.reduce(operator.or_, (name.startswith("all_") for name in functions))
