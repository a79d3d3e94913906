"""The table: every script of loops.py x {stock, hand-written join, ddpfix} x {even, uneven} x {2, 3 ranks}."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from compare import difference
from loops import DIFFERS, EQUAL, FAILS, FINISHES, HANGS, OPTIMIZERS, SCRIPTS, Counts, Net, Script, batch
from ranks import DDPFIX, HANG_TIMEOUT, JOIN, STOCK, Outcome, Ranks

ROWS = [pytest.param(script, world, id=f"{script.name}-{world}") for script in SCRIPTS.values() for world in script.worlds]
COLUMNS = ("even stock", "even join", "even ddpfix", "uneven stock", "uneven join", "uneven ddpfix", "one step later", "calculated")
_table: dict[tuple[str, int], dict[str, str]] = {}


class Case(NamedTuple):
    """One run of a script; ``hang``: it is expected to, so its process group has a short timeout."""

    script: str
    world: int
    mode: str
    counts: Counts
    optimizer: str
    hang: bool = False


def table() -> list[str]:
    """Lines for the end of the test run."""
    if not _table:
        return []
    width = max(len(name) for name, _ in _table) + 1
    lines = [" " * width + "ranks " + "  ".join(f"{column:14}" for column in COLUMNS)]
    for (name, world), cells in sorted(_table.items(), key=lambda row: (list(SCRIPTS).index(row[0][0]), row[0][1])):
        lines.append(f"{name:{width}}{world:<6}" + "  ".join(f"{cells.get(column, '-'):14}" for column in COLUMNS))
    return lines


def note(script: Script, world: int, column: str, text: str) -> None:
    _table.setdefault((script.name, world), {})[column] = text


def even(script: Script, world: int, mode: str) -> list[Case]:
    # All optimizers would show nothing more: nothing of them is touched on even inputs.
    first, last = script.optimizers[0], script.optimizers[-1]
    optimizers = (first,) if mode == JOIN else (last,) if world == 3 else tuple(dict.fromkeys((first, last)))
    hang = mode == JOIN and script.join == FAILS
    return [Case(script.name, world, mode, script.even, optimizer, hang) for optimizer in optimizers]


def uneven(script: Script, world: int, mode: str) -> list[Case]:
    hang = mode == JOIN and script.join == FAILS or mode == STOCK and script.stock == HANGS
    return [Case(script.name, world, mode, script.uneven, script.optimizers[0], hang)]


def later(script: Script, world: int) -> list[Case]:
    """The uneven epochs, and an even one after them."""
    counts = (*script.uneven, (script.extra,) * 3)
    optimizers = script.optimizers if world == 2 else script.optimizers[-1:]
    return [Case(script.name, world, DDPFIX, counts, optimizer) for optimizer in optimizers]


#: What each test runs.
PLANS: dict[str, Callable[[Script, int], list[Case]]] = {
    "test_even_is_stock_to_the_bit": lambda script, world: even(script, world, STOCK) + even(script, world, DDPFIX),
    "test_uneven_on_stock": lambda script, world: uneven(script, world, STOCK),
    "test_uneven_finishes_with_equal_ranks": lambda script, world: uneven(script, world, DDPFIX),
    "test_ranks_are_equal_one_even_step_later": later,
    "test_uneven_that_runs_today_is_stock_to_the_bit": lambda script, world: uneven(script, world, STOCK) + uneven(script, world, DDPFIX),
    "test_join_by_hand": lambda script, world: even(script, world, JOIN) + uneven(script, world, JOIN),
    "test_uneven_equals_join_by_hand": lambda script, world: uneven(script, world, JOIN) + uneven(script, world, DDPFIX),
    "test_uneven_equals_calculation": later,
}


class Runs:
    """Runs the cases of the selected tests, some at a time: much of a case is waiting of one rank for another, or for a timeout."""

    def __init__(self, ranks: Ranks, cases: Iterable[Case]) -> None:
        self._ranks = ranks
        self._pool = ThreadPoolExecutor(3)
        self._futures: dict[Case, Future[Outcome]] = {}
        for case in cases:
            self._submit(case)

    def _submit(self, case: Case) -> Future[Outcome]:
        if case not in self._futures:
            self._futures[case] = self._pool.submit(self._run, case)
        return self._futures[case]

    def _run(self, case: Case) -> Outcome:
        counts = tuple(tuple(epoch[: case.world]) for epoch in case.counts)
        timeout = HANG_TIMEOUT if case.hang else None
        end = SCRIPTS[case.script].end
        return self._ranks.run("loops:run", case.world, case.mode, case.script, counts, case.optimizer, timeout=timeout, end=end)

    def __call__(self, cases: list[Case]) -> list[Outcome]:
        outcomes = [self._submit(case).result() for case in cases]
        for outcome in outcomes:
            if outcome.skipped:
                pytest.skip(outcome.skipped)
        return outcomes

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def runs(ranks: Ranks, request: pytest.FixtureRequest) -> Iterator[Runs]:
    cases: list[Case] = []
    for item in request.session.items:
        name = getattr(item, "originalname", None)
        if item.path == request.path and name in PLANS:
            cases += PLANS[name](item.callspec.params["script"], item.callspec.params["world"])  # type: ignore[attr-defined]
    running = Runs(ranks, cases)
    yield running
    running.close()


def unequal_ranks(values: list[dict[str, Any]], buffers: bool = True) -> str | None:
    """Where another rank differs from the first.

    Arguments:
        buffers: compare them too. After an even step they differ, with stock as well: each rank has added its own batch, and DDP broadcasts
            them with the next forward. (So does the last loss of the rank itself, which LBFGS keeps.)
    """
    for rank, value in enumerate(values[1:], start=1):
        found = None
        for part in ("models", "optimizers"):
            mine, first = value[part], values[0][part]
            if not buffers:
                mine, first = _without_local_values(mine), _without_local_values(first)
            found = found or difference(first, mine, part)
        if found:
            return f"ranks 0 and {rank}: {found}"
        for name in value["others"]:
            if name.startswith("same on all ranks") or name.startswith("same on ranks 0 and 1") and rank == 1:
                found = difference(values[0]["others"][name], value["others"][name], name)
                if found:
                    return f"ranks 0 and {rank}: {found}"
    return None


def _without_local_values(value: Any) -> Any:
    if isinstance(value, dict):
        local = ("prev_loss", ".running_mean", ".running_var", ".num_batches_tracked")
        return {k: _without_local_values(v) for k, v in value.items() if not str(k).endswith(local)}
    return [_without_local_values(v) for v in value] if isinstance(value, list) else value


def per_rank(a: list[Any], b: list[Any]) -> str | None:
    for rank, (x, y) in enumerate(zip(a, b)):
        found = difference(x, y)
        if found:
            return f"rank {rank}: {found}"
    return None


@pytest.mark.parametrize(("script", "world"), ROWS)
def test_even_is_stock_to_the_bit(runs: Runs, script: Script, world: int) -> None:
    for stock_case, our_case in zip(even(script, world, STOCK), even(script, world, DDPFIX)):
        stock, ours = runs([stock_case, our_case])
        note(script, world, "even stock", FINISHES if stock.finished else "FAILS")
        if script.same_ranks and not script.as_stock:
            assert unequal_ranks(stock.values, buffers=False) is None
        note(script, world, "even ddpfix", "FAILS")
        found = per_rank(stock.values, ours.values)
        note(script, world, "even ddpfix", "bit-equal" if found is None else "DIFFERS")
        assert found is None, f"{our_case.optimizer}: {found}"


@pytest.mark.parametrize(("script", "world"), ROWS)
def test_uneven_on_stock(runs: Runs, script: Script, world: int) -> None:
    (outcome,) = runs(uneven(script, world, STOCK))
    found = FINISHES if outcome.finished else HANGS
    note(script, world, "uneven stock", found)
    assert found == script.stock, outcome.report()


@pytest.mark.parametrize(("script", "world"), ROWS)
def test_uneven_finishes_with_equal_ranks(runs: Runs, script: Script, world: int) -> None:
    (ours,) = runs(uneven(script, world, DDPFIX))
    note(script, world, "uneven ddpfix", "FAILS")
    found = unequal_ranks(ours.values, buffers=not script.local_buffers) if script.same_ranks else None
    note(script, world, "uneven ddpfix", "RANKS DIFFER" if found else "ranks equal" if script.same_ranks else "finishes")
    assert found is None, found


@pytest.mark.parametrize(("script", "world"), [row for row in ROWS if row.values[0].same_ranks])
def test_ranks_are_equal_one_even_step_later(runs: Runs, script: Script, world: int) -> None:
    for case in later(script, world):
        (ours,) = runs([case])
        note(script, world, "one step later", "FAILS")
        found = unequal_ranks(ours.values, buffers=False)
        note(script, world, "one step later", "ranks equal" if found is None else "RANKS DIFFER")
        assert found is None, f"{case.optimizer}: {found}"


@pytest.mark.parametrize(("script", "world"), [row for row in ROWS if row.values[0].as_stock])
def test_uneven_that_runs_today_is_stock_to_the_bit(runs: Runs, script: Script, world: int) -> None:
    stock, ours = runs(uneven(script, world, STOCK) + uneven(script, world, DDPFIX))
    found = per_rank(stock.values, ours.values)
    note(script, world, "uneven ddpfix", "bit-equal" if found is None else "DIFFERS")
    assert found is None, found


@pytest.mark.parametrize(("script", "world"), [row for row in ROWS if row.values[0].join])
def test_join_by_hand(runs: Runs, script: Script, world: int) -> None:
    """What a hand-written join() makes of the script; where it can run it, plain SGD gives the same parameters."""
    even_outcome, uneven_outcome = runs(even(script, world, JOIN) + uneven(script, world, JOIN))
    note(script, world, "even join", FINISHES if even_outcome.finished else "fails")
    note(script, world, "uneven join", FINISHES if uneven_outcome.finished else "fails")
    assert uneven_outcome.finished == (script.join != FAILS), uneven_outcome.report()


@pytest.mark.parametrize(("script", "world"), [row for row in ROWS if row.values[0].join == EQUAL])
def test_uneven_equals_join_by_hand(runs: Runs, script: Script, world: int) -> None:
    by_hand, ours = runs(uneven(script, world, JOIN) + uneven(script, world, DDPFIX))
    models = [value["models"] for value in by_hand.values], [value["models"] for value in ours.values]
    exactly, nearly = difference(*models), difference(*models, close=True)
    note(script, world, "uneven join", "= to the bit" if exactly is None else "= nearly" if nearly is None else "DIFFERENT")
    assert nearly is None, nearly


@pytest.mark.parametrize(("script", "world"), [row for row in ROWS if row.values[0].simulated])
def test_uneven_equals_calculation(runs: Runs, script: Script, world: int) -> None:
    """The same steps, calculated in one process: each divides by the world size the gradients of those ranks that still have a batch."""
    for case in later(script, world):
        (ours,) = runs([case])
        model, state = calculated(script, world, case.optimizer, case.counts)
        for value in ours.values:
            (parameters,) = value["models"]
            parameters = {name.replace("_orig_mod.", "").replace("module.", ""): p for name, p in parameters.items()}
            (theirs,) = value["optimizers"]
            exactly = difference([model, state["state"]], [parameters, theirs["state"]])
            found = difference([model, state["state"]], [parameters, theirs["state"]], close=True)
            note(script, world, "calculated", "= to the bit" if exactly is None else "= nearly" if found is None else "DIFFERENT")
            assert found is None, f"{case.optimizer}: {found}"


def calculated(script: Script, world: int, optimizer_name: str, counts: Counts) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for group in _steps(script, world, counts):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rank, epoch, index in group:
            x, y = batch(rank, epoch, index)
            gradients = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
            for t, gradient in zip(total, gradients):
                t += gradient / world
        for p, t in zip(model.parameters(), total):
            p.grad = t
        optimizer.step()
    return dict(model.state_dict()), optimizer.state_dict()


def _steps(script: Script, world: int, counts: Counts) -> Iterator[list[tuple[int, int, int]]]:
    """For each step, the batches of the ranks that have one: (rank, epoch, index)."""
    streams = [[[(rank, epoch, i) for i in range(numbers[rank])] for epoch, numbers in enumerate(counts)] for rank in range(world)]
    if script.simulated == "stream":
        streams = [[[step for epoch in stream for step in epoch]] for stream in streams]
    for epoch in range(len(streams[0])):
        for index in range(max(len(stream[epoch]) for stream in streams)):
            yield [stream[epoch][index] for stream in streams if index < len(stream[epoch])]


def test_expectations_are_of_known_kinds() -> None:
    for script in SCRIPTS.values():
        assert script.stock in (FINISHES, HANGS)
        assert script.join in (None, EQUAL, DIFFERS, FAILS)
        assert not script.as_stock or script.stock == FINISHES
