"""A watch on long waits: who waits for whom, and where.

A rank that waits in a vote cannot ask the others by another collective. A thread asks them through the
store instead: it raises a counter, which the same thread of every other rank looks at now and then, and
answers by telling where its rank stands.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from typing import Callable, Optional

from ._store import GroupStore

logger = logging.getLogger("ddpfix")


class Watch:
    """Tells, once for each wait, what a rank has been waiting for.

    Arguments:
        store: shared with the other ranks.
        rank: of this process, in its process group.
        world_size: of that group.
        waiting_since: since when this rank waits (:func:`time.monotonic`); ``None`` while it does not.
        stands: where this rank stands, in words that begin with its name.
        patience: seconds of a wait that are not worth a word.
    """

    def __init__(
        self,
        store: GroupStore,
        rank: int,
        world_size: int,
        waiting_since: Callable[[], Optional[float]],
        stands: Callable[[], str],
        patience: float,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._waiting_since = waiting_since
        self._stands = stands
        self._patience = patience
        self._tick = min(patience / 4, 15.0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpfix-watch", daemon=True)
        if store.exists:
            self._thread.start()
            _watches.add(self)

    def stop(self) -> None:
        """Ask the thread to end, and wait a moment for it.

        One that comes back from the store while the interpreter is being taken down would take the process with it.
        """
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        answered = 0
        told: Optional[float] = None
        while not self._over.wait(self._tick):
            since = self._waiting_since()
            if since is not None and since != told and time.monotonic() - since > self._patience:
                told = since
                asked = self._store.add("asked", 1)
                # The others look once in a tick.
                if asked is None or self._over.wait(2 * self._tick):
                    return
                if self._waiting_since() == since:
                    logger.warning(
                        "ddpfix: rank %d has been waiting for %.0f seconds: %s",
                        self._rank,
                        time.monotonic() - since,
                        "; ".join(self._answers()),
                    )
                continue
            asked = self._store.add("asked", 0)
            if asked is None:
                return  # the store has gone with the rank that hosted it
            if asked > answered:
                answered = asked
                self._store.set(f"stands/{self._rank}", self._stands())
                self._store.add(f"answers/{self._rank}", 1)

    def _answers(self) -> "list[str]":
        answers = []
        for rank in range(self._world_size):
            if rank == self._rank:
                answers.append(self._stands())
            elif self._store.add(f"answers/{rank}", 0):
                answers.append(self._store.get(f"stands/{rank}"))
            else:
                answers.append(f"rank {rank} does not answer")
        return answers


_watches: "weakref.WeakSet[Watch]" = weakref.WeakSet()


def stop_all() -> None:
    """End all threads."""
    for watch in list(_watches):
        watch.stop()


atexit.register(stop_all)
