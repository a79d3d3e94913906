"""Run an ordinary uneven script on two CPU ranks, first as it is, then with ddpfix.

``python -m ddpfix.demo`` starts the ranks itself and ends by itself, well
within a minute. Exit code 0: both runs went as told; 1: they did not.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import Dict, List, NamedTuple

RANKS = 2
_HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPT = os.path.join(_HERE, "train.py")
_BOOTSTRAP = os.path.join(os.path.dirname(_HERE), "bootstrap")
# Seconds that the script may take once torch is imported; it needs less than one.
LIMIT = 8.0
_IMPORT_LIMIT = 60.0

# faulthandler says where a rank sits. It starts to count when torch is there,
# because importing torch takes seconds on a slow machine.
_RUN = """
import faulthandler, runpy, sys
import torch
limit, script, stacks = float(sys.argv[1]), sys.argv[2], open(sys.argv[3], "w")
torch.set_num_threads(1)
faulthandler.dump_traceback_later(limit, exit=False, file=stacks)
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
"""


class Ended(NamedTuple):
    """How one rank ended: its last line of output, and where it sat if it was stuck."""

    said: str
    sat: str

    @property
    def finished(self) -> bool:
        return self.said.startswith("trained on")

    def told(self) -> str:
        """One line for the terminal."""
        if self.finished:
            return self.said
        return f"hangs at {self.sat}" if self.sat else f"fails: {self.said[:160]}"


def run(fix: bool) -> List[Ended]:
    """Run the script on two ranks.

    Arguments:
        fix: whether ddpfix is switched on, by environment variables alone.

    Returns:
        How each rank ended, in the order of ranks.
    """
    environment: Dict[str, str] = {k: v for k, v in os.environ.items() if not k.startswith("DDPFIX")}
    if fix:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = _BOOTSTRAP + (os.pathsep + before if before else "")
    environment["DDPFIX"] = "1" if fix else "0"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment.update(WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with tempfile.TemporaryDirectory() as folder:
        stacks = [os.path.join(folder, f"stack{rank}") for rank in range(RANKS)]
        for stack in stacks:
            open(stack, "w").close()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _RUN, str(LIMIT), SCRIPT, stacks[rank]],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for rank in range(RANKS)
        ]
        deadline = time.monotonic() + LIMIT + _IMPORT_LIMIT
        while time.monotonic() < deadline:
            # No rank is ended before all have told where they sit: it would
            # pull down the others, and they would tell of that.
            if all(p.poll() is not None or os.path.getsize(s) for p, s in zip(ranks, stacks)):
                break
            time.sleep(0.1)
        for process in ranks:
            process.kill()
        said = []
        for process in ranks:
            output, _ = process.communicate()
            lines = [line for line in output.splitlines() if line.strip()]
            finished = [line for line in lines if line.startswith("trained on")]
            said.append((finished or lines or [""])[-1])
        return [Ended(line, _where(stack)) for line, stack in zip(said, stacks)]


def _where(path: str) -> str:
    """The line of the script at which faulthandler found the main thread."""
    try:
        with open(path) as stacks:
            for line in stacks:
                # '  File "/x/train.py", line 29 in <module>'
                if f'{os.sep}train.py"' in line:
                    number = int(line.split("line ")[1].split()[0])
                    with open(SCRIPT) as script:
                        return f"train.py:{number}: {script.read().splitlines()[number - 1].strip()}"
    except (OSError, ValueError, IndexError):
        pass
    return ""


def main() -> int:
    """Run both and tell what happened."""
    print(f"{SCRIPT}: an ordinary script, {RANKS} ranks, rank 0 with 3 batches an epoch and rank 1 with 5\n")
    without = run(fix=False)
    print("without ddpfix:")
    for rank, ended in enumerate(without):
        print(f"  rank {rank}: {ended.told()}")
    fixed = run(fix=True)
    print("with ddpfix:")
    for rank, ended in enumerate(fixed):
        print(f"  rank {rank}: {ended.told()}")
    if not all(ended.finished for ended in fixed):
        print("\nddpfix did not help here; please report the output of `python -m ddpfix --status`")
        return 1
    equal = len({ended.said.rpartition(" ")[2] for ended in fixed}) == 1
    print(f"  model and optimizer are {'the same on all ranks, to the bit' if equal else 'NOT the same on all ranks'}")
    return 0 if equal and not any(ended.finished for ended in without) else 1


if __name__ == "__main__":
    sys.exit(main())
