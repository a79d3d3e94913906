"""How a rank leaves: ``destroy_process_group``, or the end of the process.

A rank whose training did not end at a meeting point may still be needed as a
shadow by ranks with more batches. It leaves with the others, but only when it
ends well: a rank that leaves because of an error says nothing, and its peers
fail as they do without ddpfix.
"""

from __future__ import annotations

import atexit
import dis
import functools
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
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
        training_thread: gives the thread that has trained last (:func:`threading.get_ident`).
    """

    def __init__(self, leave: Callable[[], None], training_thread: Callable[[], Optional[int]]) -> None:
        self._leave = leave
        self._training_thread = training_thread
        self._pid = 0
        self._finalizer: Optional[Any] = None
        self._exit_status: object = _NO_STATUS
        self._script: Optional[types.FrameType] = None

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
        else:
            self._script = _frame_of_script()

    def disarm(self) -> None:
        """Do nothing when this process ends."""
        atexit.unregister(self._ended)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._pid = 0
        self._script = None

    def goes_on(self) -> None:
        """The script trains: an exit seen earlier was caught by it."""
        self._exit_status = _NO_STATUS

    @property
    def in_error(self) -> bool:
        """Whether this process is failing, or being told to end."""
        if self._exit_status not in (_NO_STATUS, None, 0, False) or in_error():
            return True
        return self._exit_status is _NO_STATUS and self._script is not None and _was_left_by_an_exception(self._script)

    def _ended(self) -> None:
        if self._pid != os.getpid():
            return
        self._pid = 0
        if self.in_error:
            self.failed()  # for what the script itself does at exit
        elif not self._trains_elsewhere():
            self._leave()
        self._script = None  # with it go the globals of the script

    def _trains_elsewhere(self) -> bool:
        """Whether a thread that has trained is there still, and is not this one."""
        me = threading.get_ident()
        return any(thread.ident == self._training_thread() != me for thread in threading.enumerate())

    def failed(self) -> None:
        """The script has been left by an exception."""
        self._exit_status = "left by an exception"

    def thread_failed(self) -> None:
        """This thread has been left by an exception."""
        if threading.get_ident() == self._training_thread():
            self.failed()

    def exits(self, status: object) -> None:
        """The script calls ``sys.exit``, or ``exit``."""
        # Whoever is told to end (by a launcher that kills this rank in a moment, or takes its
        # GPU away) does not stay for the others, whatever status its handler exits with.
        self._exit_status = "told to end by a signal" if _in_signal_handler() else status


_NO_STATUS = object()


def _frame_of_script() -> Optional[types.FrameType]:
    """The frame in which the script itself runs on this thread: of its module, not of a function."""
    names = getattr(sys.modules.get("__main__"), "__dict__", None)
    frame: Optional[types.FrameType] = sys._getframe(1)
    found = None
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is names:
            found = frame
        frame = frame.f_back
    return found


def _was_left_by_an_exception(script: types.FrameType) -> bool:
    """Whether the script is over, and not because it came to its end.

    Of a SystemExit that nobody has caught the interpreter keeps nothing. But where the script's last instruction was no
    return, it was left by one. It may have raised one itself as its last word, ``raise SystemExit(main())``; then nothing
    tells the status, and it counts as a success, as that idiom mostly is.
    """
    if threading.current_thread() is not threading.main_thread():
        return False  # it may be running
    frame: Optional[types.FrameType] = sys._getframe(1)
    while frame is not None:
        if frame is script:
            return False
        frame = frame.f_back
    return dis.opname[script.f_code.co_code[script.f_lasti]] not in ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS")


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

    taken = [name for name, module in list(sys.modules.items()) if getattr(module, "__dict__", {}).get("exit") is sys.exit]
    places.wrap("sys", "exit", around, also=[name for name in taken if name != "sys"])

    def around_quit(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def __call__(self: Any, code: object = None) -> None:
            at_exit().exits(code)
            original(self, code)

        return __call__

    if "_sitebuiltins" in sys.modules:  # not with ``python -S``
        places.wrap("_sitebuiltins", "Quitter.__call__", around_quit)

    def around_hook(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def excepthook(arguments: Any) -> None:
            at_exit().thread_failed()
            original(arguments)

        # It is _thread._excepthook, and pickled as such.
        excepthook.__module__, excepthook.__qualname__ = "threading", "excepthook"
        return excepthook

    places.wrap("threading", "excepthook", around_hook)

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
