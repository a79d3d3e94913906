"""A slice of the soak test (see soak.py), and that its checks find what is planted for them to find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from soak import PHASES, Samples, Spec, run_phase, verdict


@pytest.mark.parametrize("phase", PHASES)
def test_nothing_grows_slows_down_or_is_wrong(ranks: Ranks, tmp_path: Path, phase: str) -> None:
    # What stock leaks must be known of process groups only, and programs are compared with what they do without ddpfix.
    share = 0.6 if phase in ("groups", "programs") else 1.0
    spec = Spec(phase, 4.0 if share == 1.0 else 5.0, interval=0.2, stall=20.0, folder=str(tmp_path), cycle=1)
    # Times of a few seconds tell of the machine's other work; they are judged in the long run.
    found, _, _ = run_phase(ranks, 2, spec, share, times=())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("plant", "phase", "message"),
    [
        ("ballots", "votes", "objects of torch.Tensor"),
        ("models", "models", "are alive though they were dropped"),
        ("wrong", "epochs", "differ between ranks"),
        ("hang", "votes", "in <lambda>"),
    ],
)
def test_what_is_planted_is_found(ranks: Ranks, tmp_path: Path, plant: str, phase: str, message: str) -> None:
    spec = Spec(phase, 2.0, interval=0.1, stall=3.0 if plant == "hang" else 20.0, folder=str(tmp_path), plant=plant)
    found, _, _ = run_phase(ranks, 2, spec, share=1.0)
    assert message in "\n".join(found)


def _written(path: Path, digest: int = 1, **growth: float) -> Samples:
    """The samples of a rank on which all is flat, but for what grows by so much in each iteration."""
    lines: list[dict[str, Any]] = [{"program": 0, "digest": digest}]
    for at in range(0, 3000, 100):
        one: dict[str, Any] = {name: 100 + at * growth.get(name, 0.0) for name in ("kilobytes", "items", "blocks", "threads", "files")}
        times = {"cpu": 1.0 + at * growth.get("cpu", 0.0), "seconds": 1.0}
        lines.append({"iterations": at, "objects": {"builtins.dict": 100 + at * growth.get("objects", 0.0)}, "times": times, **one})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Samples(str(path))


@pytest.mark.parametrize("what", ["kilobytes", "items", "blocks", "threads", "files", "objects", "cpu"])
def test_growth_is_found_unless_it_is_that_of_stock(tmp_path: Path, what: str) -> None:
    growing = _written(tmp_path / "growing", **{what: 8.0 if what == "kilobytes" else 1.0})
    flat = _written(tmp_path / "flat")
    assert verdict([flat], [flat]) == []
    assert any(what in found for found in verdict([flat, growing], [flat, flat]))
    if what in ("kilobytes", "items", "blocks", "objects"):
        assert verdict([growing], [growing]) == []
        assert verdict([flat], [growing]) == []


def test_other_results_and_too_few_samples_are_found(tmp_path: Path) -> None:
    flat = _written(tmp_path / "flat")
    assert "otherwise" in verdict([flat], [_written(tmp_path / "other", digest=2)])[0]
    lines = (tmp_path / "flat").read_text().splitlines(keepends=True)
    (tmp_path / "short").write_text("".join(lines[:5]))
    assert "too few" in verdict([Samples(str(tmp_path / "short"))], [flat])[0]
