"""The cost that the README states, in collectives per step."""

from __future__ import annotations

import os
import sys

from ranks import DDPFIX, JOIN, STOCK, Ranks

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "benchmarks"))
import collectives  # noqa: E402


def test_collectives_per_step(ranks: Ranks) -> None:
    found = collectives.counts(ranks)
    assert found["no buffers"] == {STOCK: 1, JOIN: 3, DDPFIX: 2}
    assert found["one batch norm"] == {STOCK: 3, JOIN: 6, DDPFIX: 5}
    assert found["loss reduced"] == {STOCK: 2, JOIN: 4, DDPFIX: 4}
    for case in ("inside no_sync", "evaluation", "world size 1"):
        assert found[case][DDPFIX] == found[case][STOCK]
