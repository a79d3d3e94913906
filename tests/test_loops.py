"""The table: every script of loops.py x {stock, hand-written join, ddpfix} x {even, uneven} x {2, 3 ranks}."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Iterator

import pytest
import torch
import torch.nn.functional as F
from compare import difference
from loops import DIFFERS, EQUAL, FAILS, FINISHES, HANGS, OPTIMIZERS, SCRIPTS, Counts, Net, Script, batch
from ranks import DDPFIX, HANG_TIMEOUT, JOIN, STOCK, Outcome, Ranks

ROWS = [pytest.param(script, world, id=f"{script.name}-{world}") for script in SCRIPTS.values() for world in script.worlds]
COLUMNS = ("even stock", "even join", "even ddpfix", "uneven stock", "uneven join", "uneven ddpfix", "one step later", "calculated")
_table: dict[tuple[str, int], dict[str, str]] = {}
_outcomes: dict[tuple[Any, ...], Outcome] = {}


def table() -> list[str]:
    """Lines for the end of the test run."""
    if not _table:
        return []
    width = max(len(name) for name, _ in _table) + 1
    lines = [" " * width + "ranks " + "  ".join(f"{column:14}" for column in COLUMNS)]
    for (name, world), cells in _table.items():
        lines.append(f"{name:{width}}{world:<6}" + "  ".join(f"{cells.get(column, '-'):14}" for column in COLUMNS))
    return lines


def note(script: Script, world: int, column: str, text: str) -> None:
    _table.setdefault((script.name, world), {})[column] = text


def run(ranks: Ranks, script: Script, world: int, mode: str, counts: Counts, optimizer: str, hang: bool = False) -> Outcome:
    counts = tuple(tuple(epoch[:world]) for epoch in counts)
    key = (script.name, world, mode, counts, optimizer, hang)
    if key not in _outcomes:
        timeout = HANG_TIMEOUT if hang else None
        _outcomes[key] = ranks.run("loops:run", world, mode, script.name, counts, optimizer, timeout=timeout, end=script.end)
    outcome = _outcomes[key]
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    return outcome


def later(script: Script) -> Counts:
    """The uneven epochs, and an even one after them."""
    return (*script.uneven, (script.extra,) * 3)


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
        return {k: _without_local_values(v) for k, v in value.items() if k != "prev_loss" and ".running_" not in str(k)}
    return [_without_local_values(v) for v in value] if isinstance(value, list) else value


def per_rank(a: list[Any], b: list[Any]) -> str | None:
    for rank, (x, y) in enumerate(zip(a, b)):
        found = difference(x, y)
        if found:
            return f"rank {rank}: {found}"
    return None


@pytest.fixture(scope="module")
def hangs(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    """Runs what is expected to hang side by side: it only waits for its timeout. Only for the tests that have been selected."""
    selected = {item.nodeid.rpartition("/")[2] for item in request.session.items}
    cases: list[tuple[Script, int, str, Counts]] = []
    for row in ROWS:
        script, world = row.values
        if script.stock == HANGS and f"test_loops.py::test_uneven_on_stock[{row.id}]" in selected:
            cases.append((script, world, STOCK, script.uneven))
        if script.join == FAILS and f"test_loops.py::test_join_by_hand[{row.id}]" in selected:
            cases += [(script, world, JOIN, script.uneven), (script, world, JOIN, script.even)]

    def wait(case: tuple[Script, int, str, Counts]) -> None:
        script, world, mode, counts = case
        with contextlib.suppress(pytest.skip.Exception):
            run(ranks, script, world, mode, counts, script.optimizers[0], hang=True)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(wait, cases))


@pytest.mark.parametrize(("script", "world"), ROWS)
def test_even_is_stock_to_the_bit(ranks: Ranks, script: Script, world: int) -> None:
    for optimizer in dict.fromkeys((script.optimizers[0], script.optimizers[-1])):
        stock = run(ranks, script, world, STOCK, script.even, optimizer)
        note(script, world, "even stock", FINISHES if stock.finished else "fails")
        assert stock.finished, stock.report()
        if script.same_ranks and not script.as_stock:
            assert unequal_ranks(stock.values, buffers=False) is None
        ours = run(ranks, script, world, DDPFIX, script.even, optimizer)
        note(script, world, "even ddpfix", "finishes" if ours.finished else "FAILS")
        found = per_rank(stock.values, ours.values)
        note(script, world, "even ddpfix", "bit-equal" if found is None else "DIFFERS")
        assert found is None, found


@pytest.mark.parametrize(("script", "world"), ROWS)
def test_uneven_on_stock(ranks: Ranks, hangs: None, script: Script, world: int) -> None:
    outcome = run(ranks, script, world, STOCK, script.uneven, script.optimizers[0], hang=script.stock == HANGS)
    found = FINISHES if outcome.finished else HANGS
    note(script, world, "uneven stock", found)
    assert found == script.stock, outcome.report()


@pytest.mark.parametrize(("script", "world"), ROWS)
def test_uneven_finishes_with_equal_ranks(ranks: Ranks, script: Script, world: int) -> None:
    for optimizer in script.optimizers:
        note(script, world, "uneven ddpfix", "FAILS")
        ours = run(ranks, script, world, DDPFIX, script.uneven, optimizer)
        found = unequal_ranks(ours.values, buffers=not script.local_buffers) if script.same_ranks else None
        note(script, world, "uneven ddpfix", "ranks equal" if found is None else "RANKS DIFFER")
        assert found is None, f"{optimizer}: {found}"


@pytest.mark.parametrize(("script", "world"), [row for row in ROWS if row.values[0].same_ranks])
def test_ranks_are_equal_one_even_step_later(ranks: Ranks, script: Script, world: int) -> None:
    for optimizer in script.optimizers:
        note(script, world, "one step later", "FAILS")
        ours = run(ranks, script, world, DDPFIX, later(script), optimizer)
        found = unequal_ranks(ours.values, buffers=False)
        note(script, world, "one step later", "ranks equal" if found is None else "RANKS DIFFER")
        assert found is None, f"{optimizer}: {found}"


@pytest.mark.parametrize(("script", "world"), [row for row in ROWS if row.values[0].as_stock])
def test_uneven_that_runs_today_is_stock_to_the_bit(ranks: Ranks, script: Script, world: int) -> None:
    for optimizer in dict.fromkeys((script.optimizers[0], script.optimizers[-1])):
        stock = run(ranks, script, world, STOCK, script.uneven, optimizer)
        ours = run(ranks, script, world, DDPFIX, script.uneven, optimizer)
        found = per_rank(stock.values, ours.values)
        note(script, world, "uneven ddpfix", "bit-equal" if found is None else "DIFFERS")
        assert found is None, f"{optimizer}: {found}"


@pytest.mark.parametrize(("script", "world"), [row for row in ROWS if row.values[0].join])
def test_join_by_hand(ranks: Ranks, hangs: None, script: Script, world: int) -> None:
    """What a hand-written join() makes of the script; where it can run it, plain SGD gives the same parameters."""
    optimizer = script.optimizers[0]
    even = run(ranks, script, world, JOIN, script.even, optimizer, hang=script.join == FAILS)
    stock = run(ranks, script, world, STOCK, script.even, optimizer)
    if even.finished and stock.finished:
        note(script, world, "even join", "bit-equal" if per_rank(stock.values, even.values) is None else "differs")
    else:
        note(script, world, "even join", "fails")
    uneven = run(ranks, script, world, JOIN, script.uneven, optimizer, hang=script.join == FAILS)
    note(script, world, "uneven join", "finishes" if uneven.finished else "fails")
    assert uneven.finished == (script.join != FAILS), uneven.report()


@pytest.mark.parametrize(("script", "world"), [row for row in ROWS if row.values[0].join == EQUAL])
def test_uneven_equals_join_by_hand(ranks: Ranks, script: Script, world: int) -> None:
    optimizer = script.optimizers[0]
    by_hand = run(ranks, script, world, JOIN, script.uneven, optimizer)
    ours = run(ranks, script, world, DDPFIX, script.uneven, optimizer)
    models = [value["models"] for value in by_hand.values], [value["models"] for value in ours.values]
    exactly, nearly = difference(*models), difference(*models, close=True)
    note(script, world, "uneven join", "= to the bit" if exactly is None else "= nearly" if nearly is None else "DIFFERENT")
    assert nearly is None, nearly


@pytest.mark.parametrize(("script", "world"), [row for row in ROWS if row.values[0].simulated])
def test_uneven_equals_calculation(ranks: Ranks, script: Script, world: int) -> None:
    """The same steps, calculated in one process: each divides by the world size the gradients of those ranks that still have a batch."""
    for optimizer in script.optimizers:
        ours = run(ranks, script, world, DDPFIX, script.uneven, optimizer)
        model, state = calculated(script, world, optimizer)
        for value in ours.values:
            (parameters,) = value["models"]
            parameters = {name.replace("_orig_mod.", "").replace("module.", ""): p for name, p in parameters.items()}
            (theirs,) = value["optimizers"]
            exactly = difference([model, state["state"]], [parameters, theirs["state"]])
            found = difference([model, state["state"]], [parameters, theirs["state"]], close=True)
            note(script, world, "calculated", "= to the bit" if exactly is None else "= nearly" if found is None else "DIFFERENT")
            assert found is None, f"{optimizer}: {found}"


def calculated(script: Script, world: int, optimizer_name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for group in _steps(script, world):
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


def _steps(script: Script, world: int) -> Iterator[list[tuple[int, int, int]]]:
    """For each step, the batches of the ranks that have one: (rank, epoch, index)."""
    streams = [[[(rank, epoch, i) for i in range(counts[rank])] for epoch, counts in enumerate(script.uneven)] for rank in range(world)]
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
