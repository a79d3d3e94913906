"""The protocol: a vote before what is already a collective.

All ranks of a process group have to meet before a synchronised backward, before
a buffer broadcast or a bucket rebuild in a forward, and before each collective
of the script. Right before each of these a rank votes: one all-reduce (MIN) of a
few integers. The smallest code wins, and the winner is what everybody does next:
those who voted for it perform it, the others shadow it and vote again.

This module knows ballots, rounds and who performs what. It does not know what
DistributedDataParallel does inside a step (see :mod:`ddpfix._shadow`), nor when
a loop has ended (:mod:`ddpfix._loop`) or a process exits (:mod:`ddpfix._leave`).
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, NamedTuple, Optional, Protocol, Set, Tuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import types

logger = logging.getLogger("ddpfix")


class Kind(IntEnum):
    """What a rank is about to do, in the order in which votes win."""

    BACKWARD = 0  # always wins: its voter does not wait for the result
    FORWARD = 1
    COLLECTIVE = 2
    LOOP_END = 3
    LEAVING = 4


class Forward(NamedTuple):
    """What is collective in one forward of a model.

    Arguments:
        fresh: it begins a step. A forward of a rank that has already run one
            whose backward is still to come is not; those win, so that ranks
            which have come apart pair whole steps.
        model: number of the model in its process group.
        rebuild: the one-time bucket rebuild takes place in it.
        buffers: buffers are broadcast in it.
        sync: it is a forward whose backward will synchronise, after which DDP
            sets ``require_forward_param_sync``.
    """

    fresh: bool
    model: int
    rebuild: bool
    buffers: bool
    sync: bool


class Collective(NamedTuple):
    """A collective of the script.

    Arguments:
        site: hash of the place in the script, below ``2**32``.
        shadowable: whether a rank that has run out of batches can take part in
            it. So far only barriers of the process group itself are.
        in_loop: whether the call stands in the body of a training loop;
            ``None`` if that is not known.
    """

    site: int
    shadowable: bool
    in_loop: Optional[bool] = None


class Model(Protocol):
    """What the protocol asks of a model (:class:`ddpfix._shadow.Shadow`)."""

    def shadow_backward(self) -> None: ...
    def shadow_forward(self, forward: Forward, source: int) -> None: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...


class _Unanswered(Exception):
    """The other ranks did not, or will not, answer a vote."""

    level = logging.WARNING


class _Ballot(NamedTuple):
    """One result (or one rank's vote): the integers that are reduced, unpacked."""

    kind: Kind
    detail: int
    rank: int  # lowest rank that voted for the winner
    source: int  # lowest rank that is up to date
    behind: bool  # some rank has shadowed a backward and not caught up since
    loop_end: bool  # some rank is at its loop end
    leaving: bool  # some rank is leaving
    joined: bool  # some rank has shadowed a backward during its present wait
    models: int  # number of models that every rank has


# Layout of the first integer: kind, detail, rank. 2**20 ranks, 2**36 details.
_RANK_BITS = 20
_DETAIL_BITS = 36
_SITE_BITS = 32

# The last votes of process groups that are gone. A worker thread of gloo may hold
# the tensor of a vote a moment longer than we do, and then needs the GIL to free
# it, while the destructor of the process group waits for that thread with the GIL
# held (torch 2.13, ~ProcessGroupGloo). If we do not let go, there is nothing to free.
_kept_for_good: Deque[Tuple[Any, torch.Tensor]] = deque(maxlen=64)


class Rendezvous:
    """The meeting of the ranks of one process group.

    Arguments:
        group: the process group of the DDP models.
        device: where votes are reduced.
        catch_up: makes all ranks equal to one that is up to date; called on
            every rank with that rank (in ``group``) and the number of models.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, catch_up: Callable[[int, int], None]
    ) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.models: List[Model] = []
        # Why nobody votes on this group any more (stock behaviour from then on).
        self.dissolved: Optional[str] = None
        # Depth of the user's own join(): torch's protocol runs, ours must not.
        self.suspended = 0
        # Steps were trained (or a model was built) since the ranks last met.
        self.open = False
        # A peer was seen leaving, or some rank had to shadow: ranks with more to train
        # than this one may be left when it ends, so it leaves together with them.
        self.leaves_together = False
        self.votes = 0
        self.steps_shadowed = 0
        self._told = 0  # of these, the steps that the log knows of
        self._behind = False
        self._catch_up = catch_up
        self._ballots: Dict[Tuple[int, ...], torch.Tensor] = {}
        # Models kept alive, also when the script has dropped them: a peer may
        # still train them and need this rank as its shadow.
        self._held: Set[int] = set()
        # A vote stays alive until a later one has been read: a dropped NCCL work may
        # let go of memory that is still being reduced.
        self._votes_kept: Deque[Tuple[Any, torch.Tensor]] = deque()
        # Places called from inside this rank's loop; and, where loops are not known,
        # those not yet followed by a step.
        self._sites_in_loop: Set[int] = set()
        self._sites_since_step: Set[int] = set()

    def add(self, model: Model) -> None:
        """Number a model: the ranks of a process group construct their DDP models in one order."""
        self.models.append(model)
        self._hold(len(self.models) - 1)
        self.open = True

    # -- what the ranks vote for -----------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether this rank votes at all."""
        return self.dissolved is None and not self.suspended

    def backward(self, model: int) -> None:
        """Announce the backward of ``model``; it wins, so nobody waits for the result."""
        self.open = True
        if model not in self._held:
            self._hold(model)
        if self._sites_since_step:
            self._sites_in_loop |= self._sites_since_step
            self._sites_since_step.clear()
        self._cast(Kind.BACKWARD, model)

    def forward(self, forward: Callable[[], Forward]) -> int:
        """Meet before the collective part of a forward.

        Arguments:
            forward: tells what is collective in the forward, at each vote anew: to
                shadow a backward meanwhile can make the bucket rebuild due.

        Returns:
            The rank in the process group that buffers are to be taken from.
        """
        result = self._attend(Kind.FORWARD, forward=forward)
        return result.rank if result is not None else 0

    def collective(self, collective: Collective) -> None:
        """Meet before a collective of the script; returns when it is this rank's turn to call it."""
        self._attend(Kind.COLLECTIVE, collective=collective)
        if collective.in_loop:
            self._sites_in_loop.add(collective.site)
        elif collective.in_loop is None:
            self._sites_since_step.add(collective.site)
        self._met()

    def loop_end(self) -> None:
        """Shadow the others until nobody is at a training step.

        That the others do not answer is no error of a rank that has trained its
        own steps: it goes on, and fails, if at all, where it would without ddpfix.
        """
        try:
            self._attend(Kind.LOOP_END)
            self._met()
        except _Unanswered as error:
            self._go_alone("waiting at the end of the loop", error)
        self._sites_in_loop.clear()
        self._sites_since_step.clear()

    def leave(self, patience: float, others_left: Callable[[], bool]) -> None:
        """Shadow the others until all leave.

        Arguments:
            patience: seconds to wait for one vote of the others at the most.
            others_left: whether all other ranks have left for good, so that
                nobody will answer.
        """
        try:
            self._attend(Kind.LEAVING, patience=patience, nobody_comes=others_left)
        except _Unanswered as error:
            self._go_alone("leaving", error)
        self._met()

    def dissolve(self, reason: str, level: int = logging.INFO) -> None:
        """Vote no more on this group; everything on it is stock from here on."""
        if self.dissolved is None:
            self.dissolved = reason
            logger.log(level, "rank %d: ambient join is off for this process group: %s", self.rank, reason)

    def _go_alone(self, doing: str, error: _Unanswered) -> None:
        if self._behind:
            # This rank lacks the steps it has shadowed; it must not pass its model for the final one.
            raise RuntimeError(
                f"ddpfix: rank {self.rank} shadowed the training of other ranks, which then stopped "
                f"answering ({error}); its model lacks their last steps"
            ) from error
        self.dissolve(f"{doing}, it got no answer from the others ({error})", error.level)

    def _hold(self, model: int) -> None:
        self._held.add(model)
        self.models[model].hold()

    def _met(self) -> None:
        self.open = False
        if self.steps_shadowed > self._told:
            logger.info(
                "rank %d had run out of batches and shadowed %d steps of other ranks; it is up to date again",
                self.rank,
                self.steps_shadowed - self._told,
            )
            self._told = self.steps_shadowed
        for model in self._held:
            self.models[model].release()
        self._held.clear()

    # -- rounds ----------------------------------------------------------------

    def _attend(
        self,
        kind: Kind,
        forward: Optional[Callable[[], Forward]] = None,
        collective: Optional[Collective] = None,
        patience: Optional[float] = None,
        nobody_comes: Optional[Callable[[], bool]] = None,
    ) -> Optional[_Ballot]:
        """Vote, and shadow what wins, until it is this rank's turn.

        Returns:
            The result that it goes on with; ``None`` if nothing collective was left to do.
        """
        joined, mine = False, None
        while True:
            detail = 0
            if forward is not None:
                mine = forward()
                if not (mine.rebuild or mine.buffers):
                    return None
                detail = _pack_forward(mine, self._behind)
            elif collective is not None:
                detail = _pack_collective(collective, joined)
            work, tensor = self._cast(kind, detail, joined)
            try:
                if patience is not None and nobody_comes is not None:
                    _await(work, patience, nobody_comes)
                work.wait()
            except RuntimeError as error:  # the process group's own: a timeout, a closed connection
                if kind in (Kind.LOOP_END, Kind.LEAVING):
                    raise _Unanswered(str(error).strip().split("\n")[0]) from error
                raise
            self._forget_old_votes()
            result = _unpack(tensor.tolist())
            self.leaves_together |= result.leaving or result.joined

            if result.kind is Kind.BACKWARD:
                self._model(result.detail).shadow_backward()
                self.steps_shadowed += 1
                self._behind = joined = True
                continue

            if result.kind is Kind.FORWARD:
                winner, behind = _unpack_forward(result.detail)
                if behind:
                    self._all_catch_up(result)
                if kind is Kind.FORWARD and winner == mine:
                    return result
                self._model(winner.model).shadow_forward(winner, result.rank)
                continue

            # Nobody is at a training step.
            if result.behind:
                self._all_catch_up(result)
            if result.kind is not Kind.COLLECTIVE:
                if result.kind is kind:
                    return result
                continue  # the others are at their loop end, and go; this rank leaves later
            won = _unpack_collective(result.detail)
            # A rank at its loop end goes on, unless the others are still in the loop it has left.
            stays = won.shadowable and bool(won.in_loop or won.site in self._sites_in_loop)
            goes = kind is Kind.LOOP_END and not stays
            if result.loop_end and (not won.shadowable or self._somebody(goes)):
                # It goes first; what was voted for is voted for again.
                if goes:
                    return result
                continue
            if collective is not None:
                # Nobody has shadowed a step: today's pairing, whatever the call sites. Yet a
                # barrier never pairs with anything else; it goes first, and the others mirror it.
                same_operation = collective.shadowable or not won.shadowable
                if same_operation and (not joined or won.site == collective.site or not stays):
                    return result
                # Joined: the others are still in the loop that this rank has left.
            if not won.shadowable:  # only a rank that is leaving comes here
                logger.warning(
                    "rank %d has ended its training and cannot take part in a collective that "
                    "another rank still calls; that rank will fail as it does without ddpfix",
                    self.rank,
                )
                return result
            _barrier(self.group)

    def _model(self, number: int) -> Model:
        if number >= len(self.models):
            raise RuntimeError(
                f"ddpfix: another rank trains DistributedDataParallel model number {number} of this process "
                f"group, but rank {self.rank} has made {len(self.models)}; all ranks must construct the "
                "same models in the same order, after ddpfix was imported"
            )
        return self.models[number]

    def _somebody(self, this_rank: bool) -> bool:
        """Agree, in a second vote, on whether something holds for any rank."""
        tensor = torch.tensor([0 if this_rank else 1], dtype=torch.int64, device=self.device)
        all_reduce_min(self.group, tensor).wait()
        return int(tensor.item()) == 0

    def _all_catch_up(self, result: _Ballot) -> None:
        if result.source >= self.world_size:
            raise RuntimeError(
                "ddpfix: every rank of the process group lacks steps that another one has trained; this "
                "happens when ranks train several models in different orders at the same time"
            )
        self._catch_up(result.source, result.models)
        self._behind = False

    def _cast(self, kind: Kind, detail: int, joined: bool = False) -> Tuple[Any, torch.Tensor]:
        ballot = _pack(
            kind, detail, self.rank, self.world_size, self._behind, joined, len(self.models)
        )
        tensor = self._on_device(ballot)
        work = all_reduce_min(self.group, tensor)
        self.votes += 1
        self._votes_kept.append((work, tensor))
        if len(self._votes_kept) > 8 and self._votes_kept[0][0].is_completed():
            self._votes_kept.popleft()
        return work, tensor

    def _on_device(self, ballot: List[int]) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.tensor(ballot, dtype=torch.int64, device="cpu")
        # A copy from the host would wait for the device's stream, in the backward too.
        # Nearly all ballots of a job are the same few, so they are copied on the device.
        key = tuple(ballot)
        if key not in self._ballots:
            if len(self._ballots) > 256:
                self._ballots.clear()
            self._ballots[key] = torch.tensor(ballot, dtype=torch.int64, device=self.device)
        return self._ballots[key].clone()

    def _forget_old_votes(self) -> None:
        while len(self._votes_kept) > 1:
            self._votes_kept.popleft()

    def close(self) -> None:
        """The process group is about to be destroyed."""
        _kept_for_good.extend(self._votes_kept)
        self._votes_kept.clear()


def _barrier(group: dist.ProcessGroup) -> None:
    """Take part in a barrier of the others."""
    with inner():
        dist.barrier(group)  # any barrier meets any other: torch's have no tag


def all_reduce_min(group: dist.ProcessGroup, tensor: torch.Tensor) -> Any:
    """Reduce ``tensor`` over ``group``, below ``torch.distributed.all_reduce`` and its hooks; returns the work."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
    return group.allreduce([tensor], options)


# -- what must not vote: calls made inside a collective of the script or of DDP ----------

_thread = threading.local()


class inner:
    """Context in which this thread's collectives belong to one that was voted for already."""

    def __enter__(self) -> None:
        _thread.depth = getattr(_thread, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _thread.depth -= 1


def inside() -> bool:
    """Whether this thread is inside :class:`inner`."""
    return bool(getattr(_thread, "depth", 0))


def call_site(frame: types.FrameType) -> int:
    """Hash of the place in the script that ``frame`` is at: file name, function and line."""
    code = frame.f_code
    name = code.co_filename.replace("\\", "/").rsplit("/", 1)[-1]
    return zlib.crc32(f"{name}:{code.co_name}:{frame.f_lineno}".encode())


def _await(work: Any, patience: float, nobody_comes: Callable[[], bool]) -> None:
    """Wait for a vote, but neither for ever nor for ranks that have gone."""
    deadline, pause, asked = time.monotonic() + patience, 0.0005, 0.0
    while not work.is_completed():
        now = time.monotonic()
        if now > deadline:
            raise _Unanswered(f"they have not ended their training after {patience:.0f} s")
        if now - asked > 0.2:
            if nobody_comes():
                gone = _Unanswered("they have left already")
                gone.level = logging.INFO
                raise gone
            asked = now
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


# -- packing -------------------------------------------------------------------


def _pack(
    kind: Kind, detail: int, rank: int, world_size: int, behind: bool, joined: bool, models: int
) -> List[int]:
    # All are reduced with MIN, so a flag that anyone may raise is 0 where raised.
    return [
        (int(kind) << _DETAIL_BITS | detail) << _RANK_BITS | rank,
        world_size if behind else rank,
        0 if behind else 1,
        0 if kind is Kind.LOOP_END else 1,
        0 if kind is Kind.LEAVING else 1,
        0 if joined else 1,
        models,
    ]


def _unpack(numbers: List[int]) -> _Ballot:
    code, source, not_behind, not_loop_end, not_leaving, not_joined, models = numbers
    return _Ballot(
        Kind(code >> _RANK_BITS >> _DETAIL_BITS),
        code >> _RANK_BITS & (1 << _DETAIL_BITS) - 1,
        code & (1 << _RANK_BITS) - 1,
        source,
        not not_behind,
        not not_loop_end,
        not not_leaving,
        not not_joined,
        models,
    )


def _pack_forward(forward: Forward, behind: bool) -> int:
    # A voter that is behind wins among equal forwards, so that all see that it must catch up first.
    return (
        int(forward.fresh) << (_DETAIL_BITS - 1)
        | forward.model << 4
        | int(not forward.rebuild) << 3
        | int(not forward.buffers) << 2
        | int(not forward.sync) << 1
        | int(not behind)
    )


def _unpack_forward(detail: int) -> Tuple[Forward, bool]:
    return (
        Forward(
            bool(detail >> (_DETAIL_BITS - 1)),
            (detail & (1 << _DETAIL_BITS - 1) - 1) >> 4,
            not detail & 8,
            not detail & 4,
            not detail & 2,
        ),
        not detail & 1,
    )


def _pack_collective(collective: Collective, joined: bool) -> int:
    # Those not joined are still in their loop and come first; then what others can take
    # part in; then what stands in a loop.
    return (
        int(joined) << (_SITE_BITS + 2)
        | int(not collective.shadowable) << (_SITE_BITS + 1)
        | int(not collective.in_loop) << _SITE_BITS
        | collective.site
    )


def _unpack_collective(detail: int) -> Collective:
    return Collective(
        detail & (1 << _SITE_BITS) - 1,
        not detail >> (_SITE_BITS + 1) & 1,
        not detail >> _SITE_BITS & 1,
    )
