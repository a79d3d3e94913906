"""Randomly drawn programs: even ones are bit-equal to stock, uneven ones finish with equal ranks."""

from __future__ import annotations

import os

import pytest
from programs import draw
from ranks import DDPFIX, STOCK, Ranks
from test_loops import per_rank, unequal_ranks

FIRST, NUMBER = int(os.environ.get("DDPFIX_TESTS_FIRST_SEED", "0")), int(os.environ.get("DDPFIX_TESTS_SEEDS", "30"))
SEEDS = range(FIRST, FIRST + NUMBER)


@pytest.mark.parametrize("seed", SEEDS)
def test_even_program_is_stock_to_the_bit(ranks: Ranks, seed: int) -> None:
    program = draw(seed, uneven=False)
    stock, ours = (ranks.run("programs:run", program.world_size, mode, program, end=program.end) for mode in (STOCK, DDPFIX))
    assert stock.finished, f"{program}\n{stock.report()}"
    assert ours.finished, f"{program}\n{ours.report()}"
    found = per_rank(stock.values, ours.values)
    assert found is None, f"{found}\n{program}"


@pytest.mark.parametrize("seed", SEEDS)
def test_uneven_program_finishes_with_equal_ranks(ranks: Ranks, seed: int) -> None:
    program = draw(seed, uneven=True)
    ours = ranks.run("programs:run", program.world_size, DDPFIX, program, end=program.end)
    assert ours.finished, f"{program}\n{ours.report()}"
    found = unequal_ranks(ours.values, buffers=False)
    assert found is None, f"{found}\n{program}"
