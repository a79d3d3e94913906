"""Where a script stands, and when a training loop has ended: the rules, and the DataLoader hooks that feed them.

``StopIteration`` from a DataLoader is a hint, not a proof. A plain ``for`` that
it ends is over for good; a prefetching wrapper, a restarting ``next()`` or
``itertools.cycle`` goes on training afterwards. This module tells the two apart
by looking at who asked for the batch. It knows nothing of process groups: it is
told when a step of something was trained (:meth:`Loops.trained`) and tells when
a loop that trained it has ended (``on_end``). In doubt a loop has not ended; nothing is lost then, because
ranks meet at their next collective anyway.
"""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import logging
import os
import sys
import threading
import types
import weakref
import zlib
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

if TYPE_CHECKING:
    from ._patches import Places

logger = logging.getLogger("ddpfix")

_FOR_ITER = dis.opmap["FOR_ITER"]
_GET_ITER = dis.opmap["GET_ITER"]
# ``yield from`` delegates with YIELD_FROM up to Python 3.10, with SEND from 3.11 on.
_DELEGATE = {dis.opmap[name] for name in ("SEND", "YIELD_FROM") if name in dis.opmap}
_YIELD = {dis.opmap[name] for name in ("YIELD_VALUE", "YIELD_FROM", "SEND") if name in dis.opmap}
_JUMPS = set(dis.hasjrel) | set(dis.hasjabs)
_NEVER_FALLS_THROUGH = {
    dis.opmap[name]
    for name in (
        "JUMP_FORWARD",
        "JUMP_ABSOLUTE",
        "JUMP_BACKWARD",
        "JUMP_BACKWARD_NO_INTERRUPT",
        "RETURN_VALUE",
        "RETURN_CONST",
        "RAISE_VARARGS",
        "RERAISE",
    )
    if name in dis.opmap
}

_RETURNS = {dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap}

# Iterators written in C stand between a loader and a ``for`` without a frame of
# their own. These end with the iterator they read from; every other one
# (cycle, chain, zip_longest, ...) may go on.
_ENDS_WITH_ITS_SOURCE = (
    enumerate,
    zip,
    map,
    filter,
    itertools.islice,
    itertools.starmap,
    itertools.takewhile,
)
_GOES_ON: Tuple[type, ...] = (
    itertools.chain,
    itertools.cycle,
    itertools.zip_longest,
    type(itertools.tee(())[0]),
)


class ForStatement(NamedTuple):
    """A running ``for`` statement: the frame it runs in and where its body lies."""

    frame: types.FrameType
    start: int  # offset of its FOR_ITER
    end: int  # offset where execution goes on after the loop


class _Instructions:
    """The control flow of one code object, decoded once."""

    def __init__(self, code: types.CodeType) -> None:
        listing = []
        self._begins: Dict[int, int] = {}
        prefix: Optional[int] = None
        for instruction in dis.get_instructions(code):
            if instruction.opcode == dis.EXTENDED_ARG:
                # A jump to an instruction with a large argument (a ``for`` with a long body) goes to its first prefix.
                prefix = instruction.offset if prefix is None else prefix
                continue
            self._begins[instruction.offset if prefix is None else prefix] = instruction.offset
            prefix = None
            listing.append(instruction)
        self.opcode: Dict[int, int] = {i.offset: i.opcode for i in listing}
        self.target: Dict[int, int] = {
            i.offset: self.behind_prefixes(i.argval) for i in listing if i.opcode in _JUMPS and isinstance(i.argval, int)
        }
        offsets = [i.offset for i in listing]
        self.following: Dict[int, int] = dict(zip(offsets, offsets[1:]))
        self._left_early: Dict[Tuple[int, int], bool] = {}

    def behind_prefixes(self, offset: int) -> int:
        """The instruction that begins at ``offset``, with its EXTENDED_ARGs."""
        return self._begins.get(offset, offset)

    def _reachable(self, offset: int, but: Optional[int] = None) -> Iterator[int]:
        """The offsets that can be reached from ``offset``, by ways that do not lead through ``but``."""
        pending, seen = [offset], {but}
        while pending:
            at = pending.pop()
            if at in seen or at not in self.opcode:
                continue
            seen.add(at)
            yield at
            if at in self.target:
                pending.append(self.target[at])
            if self.opcode[at] not in _NEVER_FALLS_THROUGH and at in self.following:
                pending.append(self.following[at])

    def yields_from_here(self, offset: int) -> bool:
        """Whether a ``yield`` can be reached from ``offset``."""
        return any(self.opcode[at] in _YIELD for at in self._reachable(offset))

    def leaves_early(self, start: int, end: int) -> bool:
        """Whether the ``for`` from ``start`` to ``end`` can be left otherwise than by its last item.

        ``break`` and ``return`` count; an exception does not.
        """
        key = (start, end)
        if key not in self._left_early:  # asked at every collective in the loop
            self._left_early[key] = any(
                not start < at < end or self.opcode[at] in _RETURNS
                for at in self._reachable(self.following.get(start, -1), but=start)
            )
        return self._left_early[key]

    def in_while(self, start: int, end: int) -> bool:
        """Whether the innermost loop around the ``for`` from ``start`` to ``end`` is a ``while``."""
        outer = [at for at, opcode in self.opcode.items() if opcode == _FOR_ITER and at < start and end <= self.target[at]]
        innermost = max(outer, default=-1)
        # Back from behind the ``for`` to before it; a ``for`` around it would go back to its own FOR_ITER.
        return any(at >= end and innermost < target < start for at, target in self.target.items())


# Bounded: a script has few loops, but code objects made at run time (exec,
# notebooks) must not pile up over a long job.
_instructions = functools.lru_cache(maxsize=256)(_Instructions)


def for_statement(frame: Optional[types.FrameType]) -> Optional[ForStatement]:
    """Find the plain ``for`` on whose behalf ``frame`` just asked for an item.

    Arguments:
        frame: the frame that called ``__next__`` of an iterator.

    Returns:
        The ``for`` statement that is over when that iterator is exhausted, or
        ``None`` where there is none: an explicit ``next()``, or a generator that
        can yield again after its own inner loop (``cycle``, a prefetcher that
        holds a batch back). Generators that only pass items on (``tqdm``,
        ``log_every``) are looked through.
    """
    while frame is not None:
        code = frame.f_code
        instructions = _instructions(code)
        at = instructions.behind_prefixes(frame.f_lasti)  # up to Python 3.10 it is the offset of the first prefix
        opcode = instructions.opcode.get(at)
        if opcode == _FOR_ITER:
            after = instructions.target[at]
        elif opcode in _DELEGATE:
            after = instructions.following.get(at, -1)
            after = instructions.target.get(at, after)
        else:
            return None
        if not code.co_flags & (0x20 | 0x200):  # neither generator nor async generator
            return ForStatement(frame, at, after) if opcode == _FOR_ITER else None
        if instructions.yields_from_here(after):
            return None
        frame = frame.f_back
    return None


def _between(iterator: object) -> bool:
    """Whether only C iterators that end with ``iterator`` stand between it and its ``for``."""
    pending: List[object] = [iterator]
    seen: Set[int] = set()
    while pending:
        holder = pending.pop()
        seen.add(id(holder))
        # The list that get_referrers returns, and ``pending`` itself, refer to
        # the objects too; neither is an iterator, so they fall out below.
        for referrer in gc.get_referrers(holder):
            if id(referrer) in seen:
                continue
            if isinstance(referrer, _GOES_ON):
                return False
            if isinstance(referrer, _ENDS_WITH_ITS_SOURCE):
                pending.append(referrer)
            elif type(referrer) is tuple and any(
                isinstance(above, (zip, map, itertools.zip_longest, itertools.chain))
                for above in gc.get_referrers(referrer)
            ):
                pending.append(referrer)  # zip and map keep their sources in a tuple
    return True


class _Feed:
    """What one DataLoader iterator has handed out."""

    __slots__ = ("__weakref__", "ahead", "created", "handed", "length", "over", "owner", "stepped", "steps_then", "stopped", "trained", "where")

    def __init__(self) -> None:
        self.created: Optional[Tuple[types.CodeType, int, bool]] = None
        self.owner: Optional[weakref.ref[Any]] = None
        self.length: Optional[int] = None  # batches that it has in all, where that is known
        self.reset()

    def reset(self) -> None:
        self.handed = 0
        self.ahead = False  # batches were handed out with no step between them
        self.over = False  # it has run out of batches, and was not begun anew
        self.stopped = False  # its last batches are kept from the script
        self.steps_then = 0  # Loops.steps when the last batch was handed out
        self.trained: Set[Any] = set()  # what was trained on its batches
        self.stepped = False  # steps were made on them, be it only to accumulate gradients
        # The loop it feeds, without keeping the frame alive.
        self.where: Optional[Tuple[int, types.CodeType, int, int]] = None


class Position(NamedTuple):
    """Where a call stands, as far as loops go.

    Arguments:
        in_body: in the body of a training loop; ``None`` where that is not known.
        trains_on: and that loop is left only with its last batch.
        of_loop: a training loader has batches left, so the call may well belong to the loop that it feeds.
        last_one: so it may, but that loader has handed out its last batch.
        loops: the ``for`` statements over DataLoaders around it, known to train or not; and whether they are
            left only with their last batch.
        ended: the ``for`` statement of the training loop that has ended last, unless it has begun anew.
        ran_dry: a training loader has run out of batches, and no step has followed.
    """

    in_body: Optional[bool]
    trains_on: bool = False
    of_loop: bool = False
    last_one: bool = False
    loops: Tuple[Tuple[int, bool], ...] = ()
    ended: Optional[int] = None
    ran_dry: bool = False


class Loops:
    """The training loops of this process.

    Arguments:
        on_end: called, on the training thread, when a plain ``for`` over a
            DataLoader that fed training steps has ended, with what was trained
            in it (the subjects given to :meth:`trained`) and the place in the script.
        expects_training: what an empty loader may have been meant to train:
            asked only where there was no batch at all, from a loader that never
            fed a training step.
        on_nothing: called, with that, where an explicit ``next()`` got no batch at
            all: whether a loop has ended is not known, but others may train.
        may_have: asked before a training loader hands out a batch, with what it
            trains, the place in the script, and how many batches it has left, that
            one included: whether the batch is to be had. If not, the loader has ended.
        stop_together: which of the given subjects are trained in loops that all end with the
            first one to end. There, a loader that runs dry ahead of the loop that it
            feeds (one batch is held back) ends the loops of all.
    """

    def __init__(
        self,
        on_end: Callable[[Set[Any], str], None],
        expects_training: Callable[[], Set[Any]],
        on_nothing: Callable[[Set[Any]], None],
        may_have: Callable[[Set[Any], str, Optional[int]], bool] = lambda trains, where, left: True,
        stop_together: Callable[[Set[Any]], Set[Any]] = lambda subjects: set(),
    ) -> None:
        self.steps = 0
        self._ran_dry = False  # see Position
        self.passes = 0  # over training loaders, that have run out of batches
        self._knows_loops = False  # a plain ``for`` over a DataLoader has trained
        self.ended: Optional[int] = None  # see Position
        self.on_end = on_end
        self._expects_training = expects_training
        self._on_nothing = on_nothing
        self._may_have = may_have
        self._stop_together = stop_together
        self.thread: Optional[int] = None
        self._feeds: weakref.WeakSet[_Feed] = weakref.WeakSet()
        self._last_step: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._trained_by: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = (
            weakref.WeakKeyDictionary()
        )
        # The ``for`` statements that have trained something: code and offset.
        self._training_sites: Set[Tuple[types.CodeType, int]] = set()
        # Where the iterators that have fed training otherwise (explicit next(), a prefetcher) were made.
        self._training_places: Set[Tuple[types.CodeType, int]] = set()
        self._verdicts: Dict[Tuple[Any, ...], bool] = {}

    def trained(self, subject: Any, synchronised: bool) -> None:
        """One step of ``subject`` was trained.

        Arguments:
            subject: what was trained.
            synchronised: all ranks took part; false for a step that only
                accumulates gradients, which alone makes no training loop.
        """
        self.steps += 1
        self._ran_dry = False
        if synchronised:
            self._last_step[subject] = self.steps

    def runs_here(self) -> None:
        """Take the calling thread for the one that trains."""
        self.thread = threading.get_ident()

    @property
    def on_training_thread(self) -> bool:
        return self.thread is None or self.thread == threading.get_ident()

    # -- called by the wrappers around the DataLoader ------------------------------

    def began(self, loader: Any, iterator: Any, frame: types.FrameType) -> None:
        """``iter(loader)`` was evaluated in ``frame`` and gave ``iterator``."""
        feed = _feed_of(iterator)
        feed.reset()
        opcode = _instructions(frame.f_code).opcode.get(frame.f_lasti)
        feed.created = (frame.f_code, frame.f_lasti, opcode == _GET_ITER)
        feed.owner = weakref.ref(loader)
        # Of map-style datasets only: asking an IterableDataset has effects (DataLoader.__len__).
        if getattr(loader, "_dataset_kind", None) == 0:
            feed.length = len(loader)

    def trains(self, iterator: Any, frame: types.FrameType) -> Set[Any]:
        """What the next batch of ``iterator`` is for, those trained in loops that all end with the first.

        Returns:
            Empty unless it is known to feed training steps, from earlier batches, earlier passes, or
            another loader at the same ``for``.
        """
        if threading.get_ident() != self.thread:
            return set()
        feed = _feed_of(iterator)
        self._note_training(feed)
        if feed.trained:
            return self._stop_together(feed.trained)
        # From the first batch on only where training is expected: one rank may look at its data alone, at some other
        # place, in evaluation mode or without gradients, and nobody would answer.
        expected = self._stop_together(self._expects_training())
        if not expected:
            return set()
        statement = for_statement(_asker(frame, iterator))
        if not self._trained_here(feed, statement):
            return set()
        before = self._trained_before(feed)
        if before:
            return before & expected
        return expected if statement is not None and not feed.handed else set()

    def may_have(self, trains: Set[Any], iterator: Any, where: str) -> bool:
        """Ask whether the script may have the batch that ``iterator`` is about to hand out."""
        feed = _feed_of(iterator)
        left = feed.length - feed.handed if feed.length is not None else None
        feed.stopped = not self._may_have(trains, where, left)
        return not feed.stopped

    def handed(self, iterator: Any, frame: types.FrameType) -> None:
        """``iterator`` has handed a batch to the code running in ``frame``."""
        feed = _feed_of(iterator)
        self._note_training(feed)
        self._ran_dry = self._ran_dry and not self._trained_before(feed)
        if not feed.handed:
            self._feeds.add(feed)
            statement = for_statement(_asker(frame, iterator))
            if statement is not None:
                if self.ended == _key(statement.frame.f_code, statement.start):
                    self.ended = None
                feed.where = (
                    id(statement.frame),
                    statement.frame.f_code,
                    statement.start,
                    statement.end,
                )
        feed.ahead |= bool(feed.handed) and feed.steps_then == self.steps
        feed.handed += 1
        feed.over = False
        feed.steps_then = self.steps

    def exhausted(self, iterator: Any, frame: types.FrameType) -> Set[Any]:
        """``iterator`` had nothing left for the code running in ``frame``.

        Returns:
            What was trained in the loop that has ended with it; empty where none has.
        """
        feed = _feed_of(iterator)
        if feed.over:
            return set()  # a prefetcher asks once more for each batch that it holds
        # Whether the last batch was trained on must not matter: a rank may have skipped
        # its own (``continue``), and all ranks have to come to the same answer. A loop
        # that holds a batch back and trains on it afterwards meets the others here, too.
        self._note_training(feed)
        created, trained = feed.created, set(feed.trained)
        # A batch that was handed out is still to be trained on, as far as can be seen.
        held_back = not feed.handed or feed.ahead or self.steps == feed.steps_then
        stopped = feed.stopped
        # A loop shorter than a window of accumulation is like an empty one.
        nothing = not feed.handed
        no_step = nothing or (feed.stepped and not trained)
        before = self._trained_before(feed)
        feed.reset()
        feed.over, feed.stopped = True, stopped
        if threading.get_ident() != self.thread:
            return set()  # a prefetch thread reads ahead
        if trained or nothing and before:
            self._ran_dry = True
            self.passes += 1
        statement = for_statement(_asker(frame, iterator))
        if statement is None and held_back and not stopped and (trained or self._trained_here(feed, None)):
            alike = self._stop_together(before) & self._expects_training()
            if alike:
                return alike
        if not (trained or no_step):
            # There were batches and none was trained on: no training loop (rank 0 alone may
            # evaluate on its training data).
            return set()
        if statement is None:
            if nothing and not stopped:
                self._on_nothing(before or self._expects_training())
            return set()
        if any(trains for _, trains in self._around(statement.frame, feed)):
            return set()
        instructions = _instructions(statement.frame.f_code)
        if instructions.in_while(statement.start, statement.end) and instructions.leaves_early(statement.start, statement.end):
            # ``while step < limit: for batch in loader: ... break``: a pass over the data, not an epoch. Ranks with
            # passes of different length run today, if they all come to the limit.
            return set()
        if no_step:
            # A rank without any batch has to meet the others, too; but an empty loader
            # beside loops that are known to train is some other one.
            site = (statement.frame.f_code, statement.start)
            trained = before
            if not trained and (site in self._training_sites or not self._training_sites):
                trained = self._expects_training()
        if not trained or not self._ends_its_for(iterator, created, statement):
            return set()
        self._knows_loops = True
        self.ended = _key(statement.frame.f_code, statement.start)
        return trained

    # -- the rules -------------------------------------------------------------

    def _note_training(self, feed: _Feed) -> None:
        """Note what was trained on the last batch of ``feed``."""
        if not feed.handed or self.steps == feed.steps_then:
            return
        feed.stepped = True
        subjects = {s for s, step in self._last_step.items() if step > feed.steps_then}
        feed.trained |= subjects
        self._knows_loops |= bool(subjects) and feed.where is not None
        if subjects and feed.where is not None and len(self._training_sites) < 256:
            self._training_sites.add((feed.where[1], feed.where[2]))
        if subjects and feed.where is None and feed.created is not None and len(self._training_places) < 256:
            self._training_places.add(feed.created[:2])
        owner = feed.owner() if feed.owner is not None else None
        if owner is not None:
            self._trained_by.setdefault(owner, weakref.WeakSet()).update(subjects)

    def _trained_here(self, feed: _Feed, statement: Optional[ForStatement]) -> bool:
        """Whether a loop at this place has trained before."""
        if statement is not None:
            return (statement.frame.f_code, statement.start) in self._training_sites
        return feed.created is not None and feed.created[:2] in self._training_places

    def _trained_before(self, feed: _Feed) -> Set[Any]:
        """What this loader has trained so far, in earlier passes too."""
        owner = feed.owner() if feed.owner is not None else None
        return feed.trained | set(self._trained_by.get(owner, ()) if owner is not None else ())

    def position(self, frame: types.FrameType) -> Position:
        """Where the code at ``frame`` stands; where a rule fails, nothing is known."""
        return _guarded(self._position, frame) or Position(None)

    def _position(self, frame: types.FrameType) -> Position:
        around = self._around(frame, None)
        loops = tuple(
            (_key(code, start), not _instructions(code).leaves_early(start, end)) for (_, code, start, end), _ in around
        )
        for (_, only_by_last), (_, trains) in zip(loops, around):
            if trains:
                return Position(True, only_by_last, True, False, loops, self.ended, self._ran_dry)
        # Loops by explicit next(), and those behind a prefetcher, have no ``for`` that could be seen.
        feeding = [feed for feed in list(self._feeds) if feed.where is None and self._trains(feed)]
        # Whoever counts the batches does not ask for one more (Lightning).
        of_loop = any(feed.length is None or feed.handed < feed.length for feed in feeding)
        known = self._knows_loops and not feeding and not loops
        return Position(False if known else None, False, of_loop, bool(feeding) and not of_loop, loops, self.ended, self._ran_dry)

    def _trains(self, feed: _Feed) -> bool:
        """Whether ``feed`` feeds training steps and is not known to be exhausted."""
        stepped = feed.stepped or self.steps > feed.steps_then
        return bool(feed.handed and (stepped or self._trained_before(feed)))

    def _around(
        self, frame: Optional[types.FrameType], but: Optional[_Feed]
    ) -> List[Tuple[Tuple[int, types.CodeType, int, int], bool]]:
        """The loops that still iterate, other than that of ``but``, in whose body ``frame`` runs, innermost first.

        Returns:
            For each: where it is, and whether it is known to train.
        """
        feeds = [other for other in list(self._feeds) if other is not but and other.where is not None and other.handed]
        found = []
        while feeds and frame is not None:
            for feed in feeds:
                assert feed.where is not None
                ident, code, start, end = feed.where
                if id(frame) == ident and frame.f_code is code and start < frame.f_lasti < end:
                    found.append((feed.where, self._trains(feed)))
            frame = frame.f_back
        return found

    def _ends_its_for(
        self,
        iterator: Any,
        created: Optional[Tuple[types.CodeType, int, bool]],
        statement: ForStatement,
    ) -> bool:
        if created is not None and created[2]:
            return True  # ``for batch in loader``: nothing can stand between
        # ``for i, batch in enumerate(loader)``: whatever took the iterator is
        # written at that place in the script, so it is looked up once a place
        # (a walk over the heap: 10 to 100 ms).
        key = (created and created[:2], statement.frame.f_code, statement.start)
        if key not in self._verdicts:
            if len(self._verdicts) > 256:
                self._verdicts.clear()
            self._verdicts[key] = _between(iterator)
        return self._verdicts[key]


def _guarded(rule: Callable[..., Any], *arguments: Any) -> Any:
    """Apply a rule; one that fails (bytecode of a Python to come) says "not ended", never more."""
    try:
        return rule(*arguments)
    except Exception:
        logger.debug("loop rule %s failed; the loop counts as not ended", rule.__name__, exc_info=True)
        return None


def _feed_of(iterator: Any) -> _Feed:
    feed: Optional[_Feed] = iterator.__dict__.get("_ddpfix_feed")
    if feed is None:
        feed = iterator.__dict__["_ddpfix_feed"] = _Feed()
    return feed


def _stopped(iterator: Any) -> bool:
    feed = iterator.__dict__.get("_ddpfix_feed")
    return feed is not None and feed.stopped


def _asker(frame: Optional[types.FrameType], iterator: object) -> Optional[types.FrameType]:
    """The frame that asked, past overriding ``__next__`` methods of the same iterator."""
    # torchdata 0.11's _StatefulBaseDataLoaderIter.__next__ calls super().__next__().
    while frame is not None and frame.f_code.co_name == "__next__":
        if frame.f_locals.get("self") is not iterator:
            break
        frame = frame.f_back
    return frame


def _key(code: types.CodeType, offset: int) -> int:
    """Hash of a ``for`` statement that ranks share."""
    return zlib.crc32(f"{os.path.basename(code.co_filename)}:{code.co_name}:{offset}".encode())


def call_site(frame: Optional[types.FrameType]) -> int:
    """Hash of a place in the script, with the places it was called from, below ``2**32``.

    One line of a function that averages metrics is called from inside the loop and from behind it.
    """
    site = 0
    while frame is not None:
        code = frame.f_code
        # Not the whole path: it may differ between the machines of a job.
        spot = f"{os.path.basename(code.co_filename)}:{code.co_name}:{frame.f_lasti};"
        site = zlib.crc32(spot.encode(), site)
        frame = frame.f_back
    return site


def place(frame: Optional[types.FrameType]) -> str:
    """The innermost place outside of torch and ddpfix, in the words of a traceback: ``train.py:57``."""
    innermost = frame
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "ddpfix"):
        frame = frame.f_back
    frame = frame if frame is not None else innermost
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else "?"


def install(places: Places, loops: Callable[[], Optional[Loops]]) -> None:
    """Place the hooks on torch's DataLoader (``torch.utils.data.dataloader``, torch 2.1 to 2.15).

    Arguments:
        places: where to record what is placed.
        loops: gives the loops to tell, or ``None`` while nobody listens.
    """

    def around_next(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def __next__(self: Any) -> Any:
            listening = loops()
            if listening is None:
                return original(self)
            frame = sys._getframe(1)
            if _stopped(self):
                raise StopIteration
            over = False
            try:
                batch = original(self)
            except StopIteration:
                over = True
            if over:  # out of the ``except``: what is raised in here is not about the StopIteration
                trained = _guarded(listening.exhausted, self, frame)
                if trained:
                    listening.on_end(trained, place(frame))
                raise StopIteration
            trains = _guarded(listening.trains, self, frame)
            if trains and not listening.may_have(trains, self, place(frame)):
                _guarded(listening.exhausted, self, frame)
                # Seen by who asks for a batch without minding that there may be none.
                raise StopIteration("ddpfix: another rank has run out of batches, and the loops of all ranks end together")
            _guarded(listening.handed, self, frame)
            return batch

        return __next__

    places.wrap("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__", around_next)
    install_iter(places, loops, "torch.utils.data.dataloader", "DataLoader")


def install_iter(
    places: Places, loops: Callable[[], Optional[Loops]], module: str, loader_class: str
) -> None:
    """Place the hook on ``iter(loader)`` of one DataLoader class that defines its own."""

    def around_iter(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def __iter__(self: Any) -> Any:
            iterator = original(self)
            listening = loops()
            if listening is not None and hasattr(iterator, "__dict__"):
                _guarded(listening.began, self, iterator, sys._getframe(1))
            return iterator

        return __iter__

    places.wrap(module, f"{loader_class}.__iter__", around_iter)
