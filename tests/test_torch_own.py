"""torch's own tests of DistributedDataParallel and barriers give the same result with ddpfix as without.

They are those that torch ships (``torch.testing._internal.distributed.distributed_test``), run under gloo on two ranks, one after the other
in one pair of processes.
"""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from typing import Any

import pytest
from ranks import DDPFIX, STOCK, Ranks

PREFIXES = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallel_requires_grad",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_grads_same_across_ranks_with_no_sync",
    "test_barrier",
    "test_monitored_barrier",
)


def own(rank: int, world_size: int, mode: str, folder: str) -> dict[str, str]:
    """Run them; returns what became of each."""
    os.environ.update(BACKEND="gloo", TEMP_DIR=folder, WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test as torch_own

    class Own(torch_own.TestDistBackend, torch_own.DistributedTest._DistTestBase):
        pass

    for name in ("barrier", "test_dir"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    torch_own.Barrier.barrier_id = 0
    dist.barrier()
    dist.destroy_process_group()
    results: dict[str, str] = {}
    for name in sorted(name for name in dir(Own) if name.startswith(PREFIXES)):
        if getattr(getattr(Own, name), "__unittest_skip__", False):
            # Torch's own verdict on this machine: among them are tests that race (test_barrier_timeout_arg on Linux).
            results[name] = f"skipped ({getattr(Own, name).__unittest_skip_why__})"
            continue
        seconds = torch_own.CUSTOM_PG_TIMEOUT.get(name, 60)
        case = Own(name)
        case.rank, case.file_name = rank, os.path.join(folder, name)
        dist.init_process_group(
            "gloo", init_method=case.init_method, world_size=world_size, rank=rank, timeout=timedelta(seconds=seconds)
        )
        case._barrier(wait_for=world_size)
        try:
            # MultiProcessTestCase puts a method that starts processes in place of the test, and keeps the test as its __wrapped__.
            method = getattr(Own, name)
            getattr(method, "__wrapped__", method)(case)
            results[name] = "passed"
        except SystemExit as skipped:
            results[name] = f"skipped ({skipped.code})"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {str(error)[:300]}"
        case._barrier(wait_for=world_size)
        if dist.is_initialized():
            dist.destroy_process_group()
    return results


def test_torch_own_tests_give_the_same_results(ranks: Ranks) -> None:
    pytest.importorskip("expecttest", reason="torch's own tests need it")
    results: dict[str, list[Any]] = {}
    for mode in (STOCK, DDPFIX):
        with tempfile.TemporaryDirectory() as folder:
            results[mode] = ranks.run(own, 2, mode, folder, hard_limit=280).values
    assert len(results[STOCK][0]) >= 15
    for stock, ours in zip(results[STOCK], results[DDPFIX]):
        assert ours == stock
    passed = [name for name, result in results[DDPFIX][0].items() if result == "passed"]
    print(f"{len(passed)} passed:", *passed)
    for prefix in PREFIXES:
        assert any(name.startswith(prefix) for name in passed), (prefix, results[DDPFIX][0])
