"""The part of the job's store that belongs to one process group and is neither torch's nor the script's."""

from __future__ import annotations

import logging
from typing import Any, Dict, Optional, Tuple

import torch.distributed as dist

logger = logging.getLogger("ddpfix")

_generations: Dict[Tuple[int, ...], int] = {}


class GroupStore:
    """Counters and texts that the ranks of a process group share without meeting.

    No method raises: the store may be gone with the rank that hosted it.

    Arguments:
        group: the process group; every rank makes this object, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        # torchrun keeps one store over destroy_process_group and a new
        # init_process_group; each gets keys of its own.
        generation = _generations[ranks] = _generations.get(ranks, 0) + 1
        self._prefix = f"ddpfix/{'-'.join(map(str, ranks))}/{generation}/"
        self._store: Optional[Any] = None
        try:
            # Private, since 1.x. Without it a rank that waits in vain waits for its patience.
            store = dist.distributed_c10d._get_default_store()
            # With a connection of its own (torch 2.6 and up): a thread that waits in the store, for the
            # other ranks of a new process group, say, keeps all others from asking it anything.
            self._store = store.clone() if hasattr(store, "clone") else store
        except Exception:
            logger.debug("the process group has no store", exc_info=True)

    @property
    def exists(self) -> bool:
        """Whether there was a store to begin with."""
        return self._store is not None

    def add(self, key: str, number: int) -> Optional[int]:
        """Add to a counter and return it; ``None`` if the store does not answer.

        Store.check is not in Python before torch 2.2; adding nothing reads a counter.
        """
        try:
            return int(self._store.add(self._prefix + key, number)) if self._store is not None else None
        except Exception:
            logger.debug("the store does not answer", exc_info=True)
            return None

    def set(self, key: str, text: str) -> None:
        """Leave a text for the others."""
        try:
            if self._store is not None:
                self._store.set(self._prefix + key, text)
        except Exception:
            logger.debug("the store does not answer", exc_info=True)

    def get(self, key: str) -> str:
        """A text that somebody has set; it is waited for, so it must be known to be there."""
        try:
            return str(self._store.get(self._prefix + key).decode()) if self._store is not None else ""
        except Exception:
            logger.debug("the store does not answer", exc_info=True)
            return ""
