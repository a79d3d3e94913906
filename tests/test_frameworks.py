"""ddpfix under training frameworks: each program of frameworks.py on two ranks, with even and uneven inputs, without and with ddpfix.

An optional group: a test skips where its package is not installed. ``pip install -e ".[test,frameworks]"`` brings all of them.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterable, Iterator

import pytest
from compare import difference
from frameworks import FAILS, FINISHES, HANGS, PROGRAMS, REFUSED, Counts, Program
from ranks import DDPFIX, HANG_TIMEOUT, STOCK, Outcome, Ranks

WORLD = 2
#: Some of the frameworks go on after a collective has failed, so that a program that hangs may hang several times.
HARD_LIMIT = 40.0


class Runs:
    """Runs the cases of the selected tests, two at a time, and each once."""

    def __init__(self, folder: Path) -> None:
        # Imported once, and not by each rank of each case.
        self._ranks = Ranks("import frameworks; frameworks.import_packages()")
        self._folder = folder
        self._pool = ThreadPoolExecutor(2)
        self._futures: dict[tuple[str, str, bool], Future[Outcome]] = {}

    def submit(self, program: Program, mode: str, uneven: bool) -> Future[Outcome]:
        key = (program.name, mode, uneven)
        if key not in self._futures:
            folder = self._folder / "-".join(map(str, key))
            folder.mkdir()
            counts = program.uneven if uneven else program.even
            self._futures[key] = self._pool.submit(self._run, program, mode, uneven, counts, folder)
        return self._futures[key]

    def _run(self, program: Program, mode: str, uneven: bool, counts: Counts, folder: Path) -> Outcome:
        hangs = mode == STOCK and uneven and program.stock == HANGS
        limits: dict[str, float] = {"timeout": HANG_TIMEOUT, "hard_limit": 8.0} if hangs else {"hard_limit": HARD_LIMIT}
        return self._ranks.run("frameworks:run", WORLD, mode, program.name, counts, str(folder), **limits)

    def __call__(self, program: Program, mode: str, uneven: bool) -> Outcome:
        if program.missing:
            pytest.skip(f"{', '.join(program.missing)} is not installed")
        return self.submit(program, mode, uneven).result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._ranks.close()


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    running = Runs(tmp_path_factory.mktemp("frameworks"))
    for item in request.session.items:
        if item.path == request.path:
            program = item.callspec.params["program"]  # type: ignore[attr-defined]
            for mode, uneven in PLANS[item.originalname] if not program.missing else ():  # type: ignore[attr-defined]
                running.submit(program, mode, uneven)
    yield running
    running.close()


#: What each test runs: the mode, and whether the inputs are uneven.
PLANS = {
    "test_even_is_stock_to_the_bit": [(STOCK, False), (DDPFIX, False)],
    "test_uneven_on_stock": [(STOCK, True)],
    "test_uneven_finishes_with_equal_ranks": [(DDPFIX, True)],
    "test_uneven_that_cannot_be_shadowed_is_refused_on_all_ranks": [(DDPFIX, True)],
    "test_uneven_that_cannot_be_shadowed_fails_at_once": [(DDPFIX, True)],
    "test_uneven_that_runs_today_is_stock_to_the_bit": [(STOCK, True), (DDPFIX, True)],
}


def each(programs: Iterable[Program]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("program", [pytest.param(program, id=program.name) for program in programs])


def per_rank(a: Outcome, b: Outcome) -> str | None:
    for rank, (x, y) in enumerate(zip(a.values, b.values)):
        found = difference(x, y)
        if found:
            return f"rank {rank}: {found}"
    return None


def parameters(state: dict[str, Any]) -> dict[str, Any]:
    # Each rank adds its own last batch to its statistics; DDP broadcasts them with the next forward.
    return {name: value for name, value in state.items() if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))}


@each(PROGRAMS.values())
def test_even_is_stock_to_the_bit(runs: Runs, program: Program) -> None:
    stock, ours = runs(program, STOCK, False), runs(program, DDPFIX, False)
    first, second = stock.values
    assert difference(parameters(first["model"]), parameters(second["model"])) is None
    if not program.as_stock:
        assert [value["steps"] for value in stock.values] == [[epoch[rank] for epoch in program.even] for rank in range(WORLD)]
    found = per_rank(stock, ours)
    assert found is None, found


@each(PROGRAMS.values())
def test_uneven_on_stock(runs: Runs, program: Program) -> None:
    outcome = runs(program, STOCK, True)
    # One that does not finish either hangs, or fails because different collectives of the ranks have met.
    assert (FINISHES if outcome.finished else HANGS) == program.stock, outcome.report()


@each(program for program in PROGRAMS.values() if program.ours == FINISHES and not program.as_stock)
def test_uneven_finishes_with_equal_ranks(runs: Runs, program: Program) -> None:
    outcome = runs(program, DDPFIX, True)
    first, second = outcome.values
    counts = program.steps or program.uneven
    assert [value["steps"] for value in outcome.values] == [[epoch[rank] for epoch in counts] for rank in range(WORLD)]
    for part in ("model", "optimizer", "same"):
        a, b = first[part], second[part]
        found = difference(parameters(a), parameters(b), part) if part == "model" else difference(a, b, part)
        assert found is None, found
    if first["saved"] is not None:
        found = difference(first["model"], first["saved"], "the last checkpoint")
        assert found is None, found


@each(program for program in PROGRAMS.values() if program.ours == REFUSED)
def test_uneven_that_cannot_be_shadowed_is_refused_on_all_ranks(runs: Runs, program: Program) -> None:
    outcome = runs(program, DDPFIX, True)
    assert all("ddpfix" in rank.line() for rank in outcome.ranks), outcome.report()


@each(program for program in PROGRAMS.values() if program.ours == FAILS)
def test_uneven_that_cannot_be_shadowed_fails_at_once(runs: Runs, program: Program) -> None:
    outcome = runs(program, DDPFIX, True)
    assert not any(rank.finished for rank in outcome.ranks) and not outcome.hard_limit_hit, outcome.report()


@each(program for program in PROGRAMS.values() if program.as_stock)
def test_uneven_that_runs_today_is_stock_to_the_bit(runs: Runs, program: Program) -> None:
    found = per_rank(runs(program, STOCK, True), runs(program, DDPFIX, True))
    assert found is None, found
