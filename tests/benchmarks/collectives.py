"""What ddpfix costs: collectives per training step, counted, and step time as a ratio.

Run it with ``python tests/benchmarks/collectives.py [--time]``. Two gloo ranks on this machine; counts do not depend on its speed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from contextlib import nullcontext
from typing import Any

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [path for path in (os.path.join(TESTS, "benchmarks"), TESTS, os.path.dirname(TESTS)) if path not in sys.path]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import DDPFIX, JOIN, STOCK, Ranks  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

WARM_UP, STEPS = 3, 10
CASES = ("no buffers", "one batch norm", "loss reduced", "inside no_sync", "evaluation", "world size 1")


def count(rank: int, world_size: int, mode: str, case: str) -> int:
    """Growth of the process group's sequence number over 10 steps."""
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(8) if case == "one batch norm" else torch.nn.ReLU()
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), norm, torch.nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(4, 4)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        if case == "loss reduced":
            dist.all_reduce(loss.detach())

    def number() -> int:
        return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]

    with model.join() if mode == JOIN and case != "evaluation" else nullcontext():
        for _ in range(WARM_UP):
            step()
        if case == "evaluation":
            with torch.no_grad():
                model(batch)
        before = number()
        with model.no_sync() if case == "inside no_sync" else torch.no_grad() if case == "evaluation" else nullcontext():
            for _ in range(STEPS):
                model(batch) if case == "evaluation" else step()
        return number() - before


def counts(ranks: Ranks) -> dict[str, dict[str, float]]:
    """Collectives per step, by case and mode."""
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        for mode in (STOCK, JOIN, DDPFIX):
            values = ranks.run("collectives:count", 1 if case == "world size 1" else 2, mode, case).values
            found.setdefault(case, {})[mode] = values[0] / STEPS
    return found


def step_time(rank: int, world_size: int, mode: str, width: int, layers: int) -> dict[str, float]:
    """Median seconds of a step in each mode, interleaved in one run."""
    import ddpfix

    def build() -> tuple[DDP, torch.optim.Optimizer]:
        stack: list[torch.nn.Module] = []
        for _ in range(layers):
            stack += [torch.nn.Linear(width, width), torch.nn.ReLU()]
        model = DDP(torch.nn.Sequential(*stack))
        return model, torch.optim.SGD(model.parameters(), lr=1e-6)

    batch = torch.randn(16, width)

    def step(model: DDP, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    times: dict[str, list[float]] = {STOCK: [], JOIN: [], DDPFIX: []}
    for turn in range(12):
        for name in (STOCK, JOIN, DDPFIX):
            (ddpfix.patch if name == DDPFIX else ddpfix.unpatch)()
            model, optimizer = build()
            with model.join() if name == JOIN else nullcontext():
                for _ in range(3):
                    step(model, optimizer)
                dist.barrier()
                start = time.perf_counter()
                for _ in range(15):
                    step(model, optimizer)
                if turn:  # the first turn warms up
                    times[name].append((time.perf_counter() - start) / 15)
    ddpfix.unpatch()
    return {name: statistics.median(values) for name, values in times.items()}


def main(arguments: list[str]) -> None:
    ranks = Ranks()
    print(f"collectives per step on 2 gloo ranks, torch {torch.__version__}\n")
    print(f"{'':16}{'stock':>10}{'join()':>10}{'ddpfix':>10}")
    for case, row in counts(ranks).items():
        print(f"{case:16}" + "".join(f"{row[mode]:10.1f}" for mode in (STOCK, JOIN, DDPFIX)))
    if "--time" in arguments:
        print(f"\nstep time, medians of interleaved blocks\n{'':24}{'stock':>10}{'/ stock':>10}{'/ join()':>10}")
        cases: list[tuple[str, tuple[Any, ...]]] = [("4 layers of 64", (64, 4)), ("30 layers of 512", (512, 30))]
        for name, size in cases:
            found = ranks.run("collectives:step_time", 2, DDPFIX, *size, hard_limit=300).values[0]
            ours = found[DDPFIX]
            print(f"{name:24}{found[STOCK] * 1e3:7.2f} ms{ours / found[STOCK]:10.2f}{ours / found[JOIN]:10.2f}")
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1:])
