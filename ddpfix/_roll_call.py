"""Whether every rank of a process group runs the same ddpfix.

A rank that votes must not meet one that does not. Each rank therefore leaves word in the group's store
before the constructor of its first DDP model communicates. When the constructor is through, all ranks have
come to it, so whoever has left no word runs without. One rank decides and leaves the verdict for the others,
who thereby all come to the same.
"""

from __future__ import annotations

import json
import time
from typing import Dict, List, Optional

from ._store import GroupStore


class RollCall:
    """The roll call of one process group.

    Arguments:
        store: the group's.
        rank: of this process in the group.
        world_size: of the group.
        runs: what must be the same on all ranks, by name.
    """

    def __init__(self, store: GroupStore, rank: int, world_size: int, runs: Dict[str, str]) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        store.set(f"runs/{rank}", json.dumps(runs))
        # Counters can be asked for without waiting. The number is there once the text is.
        store.add(f"running/{rank}", 1)

    def difference(self, patience: float) -> Optional[str]:
        """Say how the ranks differ; ``None`` where they are all alike.

        Arguments:
            patience: seconds to wait for word of ranks that may not have come here yet;
                0 if all have.
        """
        if not self._store.exists:
            return None
        first = self._store.add("roll call", 1)
        if first is None:
            return None
        if first == 1:
            self._wait(patience)
            self._store.set("verdict", self._verdict())
        return self._store.get("verdict") or None

    @property
    def is_first(self) -> bool:
        """Whether no rank below this one is there; so that one rank speaks for all."""
        return not any(map(self._is_there, range(self._rank)))

    def _wait(self, patience: float) -> None:
        deadline, pause = time.monotonic() + patience, 0.001
        while time.monotonic() < deadline and not all(map(self._is_there, range(self._world_size))):
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _is_there(self, rank: int) -> bool:
        return bool(self._store.add(f"running/{rank}", 0))

    def _verdict(self) -> str:
        there = [rank for rank in range(self._world_size) if self._is_there(rank)]
        absent = [rank for rank in range(self._world_size) if rank not in there]
        if absent:
            return f"{_ranks(absent)} without it (or without its patch join), {_ranks(there)} with it"
        runs: Dict[int, Dict[str, str]] = {rank: json.loads(self._store.get(f"runs/{rank}") or "{}") for rank in there}
        for name in sorted(set().union(*runs.values())):
            values = {rank: one.get(name, "unknown") for rank, one in runs.items()}
            if len(set(values.values())) > 1:
                parts = [
                    f"{value} on {_ranks([rank for rank, theirs in values.items() if theirs == value], verb=False)}"
                    for value in sorted(set(values.values()))
                ]
                return f"{name} is {', '.join(parts)}"
        return ""


def _ranks(ranks: List[int], verb: bool = True) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    if len(ranks) == 1:
        return f"rank {shown}" + (" runs" if verb else "")
    return f"ranks {shown}" + (" run" if verb else "")
