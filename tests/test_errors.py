"""Leaving and failing: exit codes and tracebacks are those of the script, nobody shadows on behalf of an error, nobody is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 60

#: What gloo prints when the destructor of a process group ends the process (torch 2.13): without ddpfix one in four of the even
#: runs of the script below that destroy their group, after everything was done. Not ours to judge; such a run is repeated.
GLOO_ABORTS = "terminate called without an active exception"

SCRIPT = '''
import os, signal, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

what, who = sys.argv[1], int(sys.argv[2])
COUNTS = [3, 5]

class Loader:
    def __init__(self, batches): self.batches = batches
    def __len__(self): return len(self.batches)
    def __getitem__(self, i):
        if what == "loader" and i == 2 and dist.is_initialized() and dist.get_rank() == who:
            raise ValueError("boom")
        return self.batches[i]

class Grumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): raise ValueError("boom")

def train():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batches = list(torch.randn(COUNTS[rank], 4, generator=torch.Generator().manual_seed(rank)))
    source = DataLoader(Loader(batches), batch_size=1) if "list" not in what else [b[None] for b in batches]
    me = rank == who
    for epoch in range(2):
        for i, batch in enumerate(source):
            strike = me and i == 2
            if strike and what in ("raise", "raise_list", "raise_finally"): raise ValueError("boom")
            if strike and what == "exit": sys.exit(3)
            if strike and what == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if strike and what == "interrupt": raise KeyboardInterrupt
            optimizer.zero_grad()
            output = model(batch)
            if strike and what == "forward": raise ValueError("boom")
            if strike and what == "backward": output = Grumpy.apply(output)
            output.square().sum().backward()
            optimizer.step()
    if me and what.startswith("at_the_end"): raise ValueError("boom")
    if what.startswith("good"):
        print("digest", sum(p.double().sum().item() for p in model.parameters()).hex(), flush=True)
    if what == "good_exit": sys.exit(7)

dist.init_process_group("gloo")
torch.set_num_threads(1)
try:
    train()
finally:
    if "finally" in what: dist.destroy_process_group()
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("errors") / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def run(script: Path, what: str, who: int, fix: bool) -> list[tuple[int, str]]:
    """Exit code and output of each of two ranks; a rank that outlives the limit is killed and counts as -999."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(ROOT / "ddpfix" / "bootstrap"), str(ROOT)])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), what, str(who)],
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("DDPFIX")},
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": path,
                "DDPFIX": "1" if fix else "0",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    ended = []
    deadline = time.monotonic() + LIMIT
    for process in ranks:
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            ended.append((process.returncode, output))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            ended.append((-999, output))
    return ended


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    "what",
    ["raise", "raise_list", "raise_finally", "forward", "backward", "loader", "exit", "kill", "interrupt", "at_the_end_list"],
)
def test_a_rank_that_fails_fails_as_it_does_today(script: Path, what: str, who: int) -> None:
    ended = run(script, what, who, fix=True)
    code, output = ended[who]
    peer_code, peer_output = ended[1 - who]
    expected = {"exit": 3, "kill": -signal.SIGKILL, "interrupt": -signal.SIGINT}.get(what, 1)
    assert code == expected, output
    if expected == 1:
        assert output.strip().splitlines()[-1].endswith("ValueError: boom"), output
        if what not in ("backward", "loader"):  # which pass through a wrapper
            assert "ddpfix" not in output, "a frame of ddpfix stands in the traceback of the script's own error"
    # The peer was not left waiting, and did not take the failure for success either, if it still had to train or to meet.
    assert peer_code != -999, f"the other rank waits for ever:\n{peer_output}"
    if what != "at_the_end_list" or who == 0:
        assert peer_code != 0, peer_output


@pytest.mark.parametrize("what", ["good", "good_list", "good_exit", "good_list_finally"])
def test_a_job_that_ends_well_ends_with_its_own_exit_code(script: Path, what: str) -> None:
    for _ in range(5):
        ended = run(script, what, -1, fix=True)
        if not any(code == -signal.SIGABRT and GLOO_ABORTS in output for code, output in ended):
            break
    assert [code for code, _ in ended] == [7 if what == "good_exit" else 0] * 2, ended
    if "list" not in what:  # behind a list, rank 0 prints before its last steps are caught up
        assert len({line for _, output in ended for line in output.splitlines() if line.startswith("digest")}) == 1, ended
    said = [line for _, output in ended for line in output.splitlines() if "ddpfix" in line]
    # What it has printed there lacks these steps.
    assert len(said) == ("list" in what) and all("when rank 0 had come to its end, others still trained" in line for line in said), ended


def test_without_ddpfix_such_a_job_does_not_end_well(script: Path) -> None:
    assert any(code != 0 for code, _ in run(script, "good_list", -1, fix=False))
