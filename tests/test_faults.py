"""The fault table: a rank fails, and everything is as it is without ddpfix: exit codes, tracebacks, the launcher's report, no later end."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import faults
import pytest
from faults import FAULTS, FAULTY, GROUP_TIMEOUT, MOMENTS, PEER, SWALLOWED
from ranks import DDPFIX, STOCK, Ranks

ROOT = Path(__file__).resolve().parent.parent

#: Launcher, fault, moment. A fork is cheap, so all of it is crossed; the launchers look at their processes, and not at what these were doing.
ROWS = [
    *(("fork", fault, moment) for fault in (*FAULTS, *SWALLOWED) for moment in MOMENTS),
    *(("spawn", fault, moment) for fault in (*FAULTS, *SWALLOWED) for moment in ("the peer shadows", "the peer is in a barrier")),
    *(("torchrun", fault, moment) for fault in (*FAULTS, *SWALLOWED) for moment in ("all train", "the peer is at its loop end")),
]

_rows: dict[tuple[str, str, str], tuple[Any, Any]] = {}


@functools.lru_cache(maxsize=None)
def _job(ranks: Ranks, mode: str, row: tuple[str, str, str]) -> dict[str, Any]:
    (found,) = ranks.run(faults.job, 1, mode, *row, group=False, hard_limit=100).values
    assert isinstance(found, dict)
    return found


def _jobs(ranks: Ranks, row: tuple[str, str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    _rows[row] = _job(ranks, STOCK, row), _job(ranks, DDPFIX, row)
    return _rows[row]


def table() -> list[str]:
    """What became of each row, for the summary."""
    lines = [f"{'launcher':9} {'fault':27} {'the peer':28} {'without ddpfix':38} {'with ddpfix':38} ended"]
    for (launcher, fault, moment), both in _rows.items():
        outcomes = [str(job.get("codes") or " ".join(map(str, job["report"][:3])))[:36] for job in both]
        ended = f"{both[0]['seconds']:.2f} s, {both[1]['seconds']:.2f} s" if all(job["seconds"] == job["seconds"] for job in both) else ""
        lines.append(f"{launcher:9} {fault:27} {moment:28} {outcomes[0]:38} {outcomes[1]:38} {ended}")
    return lines


@pytest.mark.parametrize("row", [row for row in ROWS if row[1] in FAULTS], ids="-".join)
def test_a_rank_that_fails_fails_as_without_ddpfix(ranks: Ranks, row: tuple[str, str, str]) -> None:
    launcher, fault, _ = row
    without, with_it = _jobs(ranks, row)
    report = f"without: {without}\nwith: {with_it}"
    assert with_it["orphans"] == without["orphans"] == [], report
    # Later by no more than chance: a killed rank's loader worker looks every 5 seconds whether the rank is there, with ddpfix as without.
    assert with_it["seconds"] <= 2 * (without["seconds"] + GROUP_TIMEOUT), report
    if launcher == "fork":
        assert with_it["codes"][FAULTY] == without["codes"][FAULTY] != 0, report
        # The peer takes the failure for no success, if it had anything left to do.
        assert (with_it["codes"][PEER] == 0) == (without["codes"][PEER] == 0), report
        before, after = ([line for line in job["output"][FAULTY].splitlines() if line] for job in (without, with_it))
        assert before[-1:] == after[-1:], report
        if fault not in ("backward", "loader", "worker"):  # which pass through a wrapper
            assert "ddpfix" not in with_it["output"][FAULTY], report
    else:
        assert with_it["report"][0] == without["report"][0], report
        if launcher == "spawn":
            named = without["report"][1]
            assert with_it["report"][1] == named, report
            if named == FAULTY:
                assert with_it["report"] == without["report"], report
                if fault not in ("backward", "loader", "worker"):
                    assert "ddpfix" not in with_it["text"], report
        recorded = [re.sub(r"Process \d+", "Process", job.get("recorded") or "") for job in (without, with_it)]
        assert recorded[0] == recorded[1], report


@pytest.mark.parametrize("row", [row for row in ROWS if row[1] in SWALLOWED], ids="-".join)
def test_a_swallowed_exception_is_a_batch_less(ranks: Ranks, row: tuple[str, str, str]) -> None:
    without, with_it = _jobs(ranks, row)
    report = f"without: {without}\nwith: {with_it}"
    assert with_it["orphans"] == [], report
    assert with_it.get("report", ["fine"]) == ["fine"] and with_it.get("codes", [0, 0]) == [0, 0], report
    if "loop" in row[2] or "train" in row[2]:  # elsewhere a rank looks before all have met
        assert with_it["digests"][0] == with_it["digests"][1] != "", report
    assert without.get("codes") != [0, 0] and without.get("report") != ["fine"], "it fails today"


@pytest.mark.parametrize("fault", FAULTS)
def test_the_record_of_a_failure_names_it(ranks: Ranks, fault: str) -> None:
    recorded = _job(ranks, DDPFIX, ("torchrun", fault, "all train"))["recorded"]
    unrecorded = dict.fromkeys(("interrupt", "sys.exit", "SystemExit", "os._exit", "kill"))
    expected = {"terminate": "got signal: 15", **unrecorded}.get(fault, "boom")
    assert (recorded is None) if expected is None else expected in recorded, recorded


# -- the commands themselves -----------------------------------------------------------

SCRIPT = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader

    def train(rank, fault):
        torch.manual_seed(0)
        model = DDP(torch.nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for epoch in range(2):
            for i, x in enumerate(DataLoader(torch.randn([3, 5][rank], 4), batch_size=1)):
                if rank == 1 and i == 4:
                    if fault == "raise": raise ValueError("boom")
                    if fault == "exit": sys.exit(3)
                    if fault == "SystemExit": raise SystemExit(3)
                    if fault == "kill": os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
        print("digest", sum(p.double().sum().item() for p in model.parameters()).hex(), flush=True)

    def spawned(rank, fault, port):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        main(fault)

    @record
    def main(fault):
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        train(dist.get_rank(), fault)

    if __name__ == "__main__":
        if "RANK" in os.environ:
            main(sys.argv[1])
        else:
            torch.multiprocessing.spawn(spawned, (sys.argv[1], sys.argv[2]), 2)
"""


@pytest.mark.parametrize(
    ("launcher", "fault"),
    [("torchrun", "SystemExit"), *((launcher, fault) for launcher in ("torchrun", "spawn") for fault in ("raise", "exit", "kill", "none"))],
)
def test_the_commands(tmp_path: Path, launcher: str, fault: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port] if launcher == "torchrun" else []
    finished = subprocess.run(
        [sys.executable, *run, str(script), fault, port],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("DDPFIX")},
            "PYTHONPATH": os.pathsep.join([str(ROOT / "ddpfix" / "bootstrap"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    output = finished.stdout + finished.stderr
    if fault == "none":
        assert finished.returncode == 0, output
        assert len({line for line in output.splitlines() if line.startswith("digest")}) == 1, output
        return
    assert finished.returncode == 1, output
    assert "digest" not in output  # nobody has trained on
    expected = {
        ("torchrun", "SystemExit"): "exitcode  : 3",
        ("torchrun", "raise"): "ValueError: boom",
        ("torchrun", "exit"): "exitcode  : 3",
        ("torchrun", "kill"): "exitcode  : -9",
        ("spawn", "raise"): "ValueError: boom",
        ("spawn", "exit"): "ProcessExitedException: process 1 terminated with exit code 3",
        ("spawn", "kill"): "ProcessExitedException: process 1 terminated with signal SIGKILL",
    }[launcher, fault]
    assert expected in output, output
