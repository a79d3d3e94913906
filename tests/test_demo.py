"""The demonstration, as the README has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_demonstration_shows_the_hang_and_the_cure() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DDPFIX")}
    done = subprocess.run(
        [sys.executable, "-m", "ddpfix.demo"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0: hangs at train.py:" in done.stdout and "dist.barrier()" in done.stdout
    assert "rank 1: hangs at train.py:" in done.stdout and "loss.backward()" in done.stdout
    assert "trained on 6 batches" in done.stdout and "trained on 10 batches" in done.stdout
    assert "the same on all ranks, to the bit" in done.stdout
