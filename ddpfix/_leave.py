"""How a rank leaves: ``destroy_process_group``, or the end of the process.

A rank whose training did not end at a meeting point may still be needed as a
shadow by ranks with more batches. It leaves with the others, but only when it
ends well: a rank that leaves because of an error says nothing, and its peers
fail as they do without ddpfix.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import types
from typing import TYPE_CHECKING, Any, Callable, Optional

from ._store import GroupStore
from ._vote import Rendezvous

if TYPE_CHECKING:
    from ._patches import Places

logger = logging.getLogger("ddpfix")


class Departure:
    """The leaving of one process group, with word of it in the group's store.

    Arguments:
        rendezvous: the meeting to leave.
        store: where word of it is left.
        patience: seconds to wait for each step of the others at the most.
    """

    def __init__(self, rendezvous: Rendezvous, store: GroupStore, patience: float) -> None:
        self._rendezvous = rendezvous
        self._store = store
        self._patience = patience
        self._left = False

    def leave(self) -> None:
        """Shadow the others until they leave, where they may need this rank; tell that it has left."""
        if self._left:
            return
        self._left = True
        rendezvous = self._rendezvous
        # Two threads must not vote at once.
        if rendezvous.live and rendezvous.waiting_since is None and (rendezvous.open or rendezvous.leaves_together):
            rendezvous.leave(self._patience, self._others_left)
        self._store.add("left", 1)

    def _others_left(self) -> bool:
        if not self._store.exists:
            return False
        left = self._store.add("left", 0)
        # A store that does not answer has gone with the rank that hosted it.
        return left is None or left > 0


class AtExit:
    """Calls ``leave`` when this process ends without an error.

    Arguments:
        leave: called once at the most.
        trains: whether some other thread of this process may be training still.
    """

    def __init__(self, leave: Callable[[], None], trains: Callable[[], bool]) -> None:
        self._leave = leave
        self._trains = trains
        self._pid = 0
        self._finalizer: Optional[Any] = None
        self._exit_status: object = None

    def arm(self) -> None:
        """Be called when this process ends. Armed late, so that it runs before torch's own clean-up."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        atexit.register(self._ended)
        if multiprocessing.parent_process() is not None:
            # Children of multiprocessing (mp.spawn) end in os._exit or after
            # _exit_function(); the latter runs finalizers with a priority, in a
            # ``finally`` where an exception in flight is visible.
            self._finalizer = multiprocessing.util.Finalize(None, self._ended, exitpriority=1000)

    def disarm(self) -> None:
        """Do nothing when this process ends."""
        atexit.unregister(self._ended)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._pid = 0

    def goes_on(self) -> None:
        """The script trains: an exit seen earlier was caught by it."""
        self._exit_status = None

    def _ended(self) -> None:
        if self._pid != os.getpid():
            return
        self._pid = 0
        if not in_error() and self._exit_status in (None, 0, False) and not self._trains():
            self._leave()

    def failed(self) -> None:
        """The script has been left by an exception."""
        self._exit_status = "left by an exception"

    def exits(self, status: object) -> None:
        """The script calls ``sys.exit``."""
        # Whoever is told to end (by a launcher that kills this rank in a moment, or takes its
        # GPU away) does not stay for the others, whatever status its handler exits with.
        self._exit_status = "told to end by a signal" if _in_signal_handler() else status


def install(places: Places, at_exit: Callable[[], AtExit]) -> None:
    """Place the recorders of what an exit handler cannot see: the exit status, and an exception that a launcher has swallowed.

    Arguments:
        places: where to record what is placed.
        at_exit: gives whom to tell; a forked child has one of its own.
    """

    def around(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def exit(status: object = None) -> None:
            at_exit().exits(status)
            original(status)

        return exit

    places.wrap("sys", "exit", around)

    def around_wrap(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def _wrap(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def main(*arguments: Any) -> Any:
                try:
                    return fn(*arguments)
                except BaseException as error:
                    at_exit().failed()
                    # Leaves no trace of this function: a bare ``raise`` adds no frame.
                    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
                    raise

            return original(main, *args, **kwargs)

        return _wrap

    # Of mp.spawn and of torchrun's agent for functions: a KeyboardInterrupt ends the process with exit code 0 (torch 2.1 to 2.15).
    if hasattr(sys.modules.get("torch.multiprocessing.spawn"), "_wrap"):
        places.wrap("torch.multiprocessing.spawn", "_wrap", around_wrap)


def in_error() -> bool:
    """Whether an error is in flight, or has ended the script, or a signal is about to."""
    if _in_signal_handler():
        return True
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and error.code in (None, 0, False):
        error = None
    # Set by the interpreter when it prints an exception nobody caught
    # (last_exc from Python 3.12 on).
    return error is not None or getattr(sys, "last_exc", getattr(sys, "last_value", None)) is not None


def _in_signal_handler() -> bool:
    """Whether a signal handler of the script, written in Python, is running on this thread."""
    handlers = {
        getattr(signal.getsignal(number), "__code__", None)
        for number in (getattr(signal, name, None) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"))
        if number is not None
    }
    frame: Optional[types.FrameType] = sys._getframe(1)
    while frame is not None:
        if frame.f_code in handlers and any(map(_holds_a_frame, frame.f_locals.values())):
            return True
        frame = frame.f_back
    return False


def _holds_a_frame(argument: object) -> bool:
    # The interpreter gives a handler the interrupted frame; the script may also call the function itself, to clean up.
    held = argument if isinstance(argument, tuple) else (argument,)
    return any(isinstance(one, types.FrameType) for one in held)
