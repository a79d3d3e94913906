"""The protocol: a vote before what is already a collective.

All ranks of a process group have to meet before a synchronised backward, before
a buffer broadcast or a bucket rebuild in a forward, and before each collective
of the script. Right before each of these a rank votes: one all-reduce (MIN) of a
few integers. The smallest code wins, and the winner is what everybody does next:
those who voted for it perform it, the others shadow it and vote again.

This module knows ballots and rounds. It does not know which collectives of the
script go together (see :mod:`ddpfix._pairing`), what DistributedDataParallel does
inside a step (:mod:`ddpfix._shadow`), nor when a loop has ended
(:mod:`ddpfix._loop`) or a process exits (:mod:`ddpfix._leave`).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from enum import IntEnum
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Protocol, Set, Tuple

import torch
import torch.distributed as dist

from ._pairing import Call, CollectiveMismatchError, Report, Role, decide, from_json, to_json

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
        signature: hash of everything that must be the same on all ranks for it
            to work, below ``2**32``.
        call: tells the rest, when it comes to that.
        in_loop: whether the call stands in the body of a loop over batches;
            ``None`` if that is not known.
        of_loop: whether such calls may be taken for part of the loop.
        ended: the training loop that has ended last on this rank.
    """

    site: int
    signature: int
    call: Callable[[], Call]
    in_loop: Optional[bool] = None
    of_loop: bool = False
    ended: Optional[int] = None


class Mirror(Protocol):
    """What the protocol asks of who knows collectives (:mod:`ddpfix._collectives`)."""

    def __call__(self, call: Call) -> None: ...


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
    joined: bool  # some rank has shadowed a step, or mirrored a call, during its present wait
    models: int  # number of models that every rank has
    one_signature: bool  # the collectives that ranks are at fit together
    one_site: bool  # they are called from one place in the script


# Layout of the first integer: kind, detail, rank. 2**20 ranks, 2**36 details.
_RANK_BITS = 20
_DETAIL_BITS = 36
_SITE_BITS = 32
_HASHES = 1 << 32  # sites and signatures are below

# Places of collectives that a rank remembers, and tells the others where needed.
_SITES_TOLD = 64

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
        mirror: takes part in a collective of others.
        keeps: tells which broadcasts this rank could repeat.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        catch_up: Callable[[int, int], None],
        mirror: Mirror,
        keeps: Callable[[], Tuple[Tuple[int, int], ...]],
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
        self.trained: List[int] = []  # synchronised steps of this rank, by model
        self.shadowed: List[int] = []  # steps of others
        self.seconds_waited = 0.0  # of these, the seconds that this rank has spent on them
        self._told: Tuple[int, int, float] = (0, 0, 0.0)  # what of this the log knows
        # For who watches the waits: the last vote in words, and since when its result is waited for.
        self.last_vote: Callable[[], str] = lambda: "has not voted yet"
        self.waiting_since: Optional[float] = None
        self._behind = False
        self._catch_up = catch_up
        self._mirror = mirror
        self._keeps = keeps
        self._ballots: Dict[Tuple[int, ...], torch.Tensor] = {}
        # Models kept alive, also when the script has dropped them: a peer may
        # still train them and need this rank as its shadow.
        self._held: Set[int] = set()
        # A vote stays alive until a later one has been read: a dropped NCCL work may
        # let go of memory that is still being reduced.
        self._votes_kept: Deque[Tuple[Any, torch.Tensor]] = deque()
        # Places that this rank has called, and how often from inside its loop; and after which step.
        self._sites: Dict[int, int] = {}
        self._step_of_site: Dict[int, int] = {}
        # It has shadowed a step, or mirrored a call, and neither trained nor met all others since.
        self._joined = False
        # A collective of this rank's that may have paired with one that it was not meant to.
        self._doubtful: Optional[str] = None

    def add(self, model: Model) -> None:
        """Number a model: the ranks of a process group construct their DDP models in one order."""
        self.models.append(model)
        self.trained.append(0)
        self.shadowed.append(0)
        self._hold(len(self.models) - 1)
        self.open = True

    def may_be_needed(self) -> None:
        """Others may be training, with or without a word of this rank: it leaves with them, and keeps the models until then."""
        self.open = True
        for model in range(len(self.models)):
            self._hold(model)

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
        self._doubtful = None
        self._joined = False
        self.trained[model] += 1
        self.last_vote = lambda: f"trained a step of model {model}"
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
        """Meet before a collective of the script; returns when it is this rank's turn to call it.

        Raises:
            CollectiveMismatchError: the ranks are at collectives that cannot meet.
        """
        self._attend(Kind.COLLECTIVE, collective=collective)
        site, step = collective.site, sum(self.trained)
        # Where loops are not known, what is called in one step (of each model) after the other is in one.
        again = collective.in_loop is None and 0 < step - self._step_of_site.get(site, step) <= len(self.models)
        self._step_of_site[site] = step
        self._sites[site] = self._sites.pop(site, 0) + (collective.of_loop or again)
        while len(self._sites) > _SITES_TOLD:  # the places that were not called for longest
            oldest = next(iter(self._sites))
            del self._sites[oldest], self._step_of_site[oldest]
        self._met()
        if self._doubtful is not None:
            self.may_be_needed()

    def loop_end(self, where: str, loop: Optional[int]) -> None:
        """Shadow the others until nobody is at a training step.

        That the others do not answer is no error of a rank that has trained its
        own steps: it goes on, and fails, if at all, where it would without ddpfix.

        Arguments:
            where: the place in the script, for the log.
            loop: hash of the loop.

        Raises:
            CollectiveMismatchError: the others call a collective in their loop that
                this rank cannot take part in.
        """
        try:
            self._attend(Kind.LOOP_END, where=f"ended its training loop at {where}", ended=loop)
            self._met()
        except _Unanswered as error:
            self._go_alone("waiting at the end of the loop", error)
        self._joined = False

    def leave(self, patience: float, others_left: Callable[[], bool]) -> None:
        """Shadow the others until all leave.

        Arguments:
            patience: seconds to wait for one vote of the others at the most.
            others_left: whether all other ranks have left for good, so that
                nobody will answer.
        """
        try:
            self._attend(
                Kind.LEAVING,
                patience=patience,
                nobody_comes=others_left,
                where="is leaving the process group",
            )
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
        where: str = "",
        ended: Optional[int] = None,
    ) -> Optional[_Ballot]:
        """Vote, and shadow what wins, until it is this rank's turn.

        Returns:
            The result that it goes on with; ``None`` if nothing collective was left to do.
        """
        mine = None
        started = time.monotonic()
        self.last_vote = lambda: _words(where, collective) + (" and is shadowing" if self._joined else "")
        while True:
            detail = 0
            if forward is not None:
                mine = forward()
                if not (mine.rebuild or mine.buffers):
                    return None
                detail = _pack_forward(mine, self._behind)
            elif collective is not None:
                detail = _pack_collective(collective, self._joined)
            work, tensor = self._cast(kind, detail, self._joined, collective)
            self.waiting_since = time.monotonic()
            try:
                if patience is not None and nobody_comes is not None:
                    _await(work, patience, nobody_comes)
                work.wait()
                numbers = tensor.tolist()  # with NCCL, the wait is here
            except RuntimeError as error:  # the process group's own: a timeout, a closed connection
                if kind in (Kind.LOOP_END, Kind.LEAVING):
                    raise _Unanswered(str(error).strip().split("\n")[0]) from error
                raise
            finally:
                self.waiting_since = None
            self._forget_old_votes()
            result = _unpack(numbers)
            self.leaves_together |= result.leaving or result.joined

            if result.kind is Kind.BACKWARD:
                self._model(result.detail).shadow_backward()
                self.shadowed[result.detail] += 1
                if kind is not Kind.FORWARD:
                    self._warn_of_doubtful()
                self._behind = self._joined = True
                now = time.monotonic()
                self.seconds_waited += now - started
                started = now
                continue

            if result.kind is Kind.FORWARD:
                winner, behind = _unpack_forward(result.detail)
                if behind:
                    self._all_catch_up(result)
                if kind is Kind.FORWARD and winner == mine:
                    return result
                self._model(winner.model).shadow_forward(winner, result.rank)
                # A step, not an evaluation by ranks that may have come further than this one.
                self._joined |= winner.sync and kind is not Kind.FORWARD
                continue

            # Nobody is at a training step.
            if result.kind is not Kind.COLLECTIVE:
                if result.behind:
                    self._all_catch_up(result)
                if result.kind is kind:
                    return result
                continue  # the others are at their loop end, and go; this rank leaves later

            everybody = not (result.loop_end or result.leaving)
            if everybody and result.one_signature and not (result.joined or result.behind):
                # Nobody has shadowed a step: today's pairing, whatever the call sites.
                if not result.one_site and collective is not None:
                    self._note_doubtful(collective, result)
                return result

            # One vote cannot carry what must be known now, so it is told in full.
            mine_told = Report(
                rank=dist.get_rank(),
                call=collective.call() if collective is not None else None,
                leaving=kind is Kind.LEAVING,
                joined=self._joined,
                where=where,
                knows=tuple(self._sites.items()),
                keeps=self._keeps(),
                ended=collective.ended if collective is not None else ended,
            )
            told = self._exchange({"report": to_json(mine_told), "behind": self._behind})
            reports = [from_json(one["report"]) for one in told]
            decision = decide(reports)
            logger.debug("rank %d, %s: %s", mine_told.rank, decision.roles[self.rank].name, reports)
            if any(
                one["behind"] and role in (Role.CALLS, Role.GOES) for one, role in zip(told, decision.roles)
            ):
                self._all_catch_up(result)
            role = decision.roles[self.rank]
            if all(each is Role.CALLS for each in decision.roles):
                self._joined = False
            if role is Role.FAILS:
                raise CollectiveMismatchError(f"ddpfix, rank {mine_told.rank}: {decision.error}.")
            if role is Role.GOES and decision.error:  # only a rank that is leaving comes here
                logger.warning("ddpfix, rank %d: %s", mine_told.rank, decision.error)
            if role is Role.CALLS and mine_told.has_run_out:
                self._warn_of_blind_pairing(mine_told.call, decision.call)
            if role in (Role.CALLS, Role.GOES):
                return result
            if role is Role.MIRRORS:
                assert decision.call is not None
                self._mirror(decision.call)
                self._joined = True

    def _model(self, number: int) -> Model:
        if number >= len(self.models):
            raise RuntimeError(
                f"ddpfix: another rank trains DistributedDataParallel model number {number} of this process "
                f"group, but rank {self.rank} has made {len(self.models)}; all ranks must construct the "
                "same models in the same order, after ddpfix was imported"
            )
        return self.models[number]

    def _exchange(self, told: Dict[str, Any]) -> List[Dict[str, Any]]:
        """Give every rank what each has to tell."""
        data = json.dumps(told).encode()
        length = torch.tensor([-len(data)], dtype=torch.int64, device=self.device)
        all_reduce_min(self.group, length).wait()
        # "cpu" is said, as a script may have set another default device.
        padded = torch.zeros(-int(length.item()), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        mine = padded.to(self.device)
        theirs = [torch.empty_like(mine) for _ in range(self.world_size)]
        self.group.allgather([theirs], [mine]).wait()
        return [json.loads(bytes(one.tolist()).rstrip(b"\0")) for one in theirs]

    def _warn_of_blind_pairing(self, mine: Optional[Call], theirs: Optional[Call]) -> None:
        assert mine is not None and theirs is not None
        if theirs.site != mine.site and theirs.alike:
            logger.warning(
                "ddpfix: rank %d has shadowed steps of other ranks, and its %s at %s pairs with %s at %s of a rank that may "
                "still be in its training loop; if the two do not belong together, both have got a wrong value",
                self.rank,
                mine.name,
                mine.where,
                theirs.name,
                theirs.where,
            )

    def _note_doubtful(self, collective: Collective, result: _Ballot) -> None:
        if _in_loop(result.detail) and collective.in_loop is False:
            self._doubtful = collective.call().where
        else:
            self._doubtful = None

    def _warn_of_doubtful(self) -> None:
        # If the others had stopped then (a flag that tells who has run out), no step would have followed.
        if self._doubtful is not None:
            logger.warning(
                "ddpfix: rank %d had ended its training loop when its collective at %s paired with one that other ranks "
                "called from inside theirs, and these went on training. If the two do not mean the same, both "
                "have got a wrong value; give all ranks the same number of batches, or call the one in the "
                "loop after the backward of its step",
                self.rank,
                self._doubtful,
            )
            self._doubtful = None

    def _all_catch_up(self, result: _Ballot) -> None:
        if result.source >= self.world_size:
            raise RuntimeError(
                "ddpfix: every rank of the process group lacks steps that another one has trained; this "
                "happens when ranks train several models in different orders at the same time"
            )
        self._catch_up(result.source, result.models)
        self._behind = False
        self._tell()

    def _tell(self) -> None:
        """Log how uneven it was since the last time; all ranks come here together."""
        now = (sum(self.trained), sum(self.shadowed), self.seconds_waited)
        trained, shadowed, seconds = (new - old for new, old in zip(now, self._told))
        self._told = now
        told = self._exchange({"trained": trained, "shadowed": shadowed, "seconds": round(seconds, 1)})
        if self.rank == 0:
            logger.info(
                "uneven inputs, rank by rank: steps trained %s, steps of others shadowed %s, seconds spent on them %s",
                *([one[what] for one in told] for what in ("trained", "shadowed", "seconds")),
            )

    def _cast(
        self, kind: Kind, detail: int, joined: bool = False, collective: Optional[Collective] = None
    ) -> Tuple[Any, torch.Tensor]:
        ballot = _pack(
            kind, detail, self.rank, self.world_size, self._behind, joined, len(self.models), collective
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


def _words(where: str, collective: Optional[Collective]) -> str:
    if collective is not None:
        call = collective.call()
        return f"is in {call.name} at {call.where}"
    return where or "is in the forward of a model"


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
    kind: Kind,
    detail: int,
    rank: int,
    world_size: int,
    behind: bool,
    joined: bool,
    models: int,
    collective: Optional[Collective] = None,
) -> List[int]:
    # All are reduced with MIN, so a flag that anyone may raise is 0 where raised. Of
    # hashes the smallest and the largest are found; ranks without one keep out of that.
    hashes = [_HASHES] * 4
    if collective is not None:
        hashes = [collective.signature, -collective.signature, collective.site, -collective.site]
    return [
        (int(kind) << _DETAIL_BITS | detail) << _RANK_BITS | rank,
        world_size if behind else rank,
        0 if behind else 1,
        0 if kind is Kind.LOOP_END else 1,
        0 if kind is Kind.LEAVING else 1,
        0 if joined else 1,
        models,
        *hashes,
    ]


def _unpack(numbers: List[int]) -> _Ballot:
    code, source, not_behind, not_loop_end, not_leaving, not_joined, models, *hashes = numbers
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
        hashes[0] == -hashes[1],
        hashes[2] == -hashes[3],
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
    # Those not joined are still in their loop and come first; then what stands in a loop.
    return int(joined) << (_SITE_BITS + 1) | int(not collective.in_loop) << _SITE_BITS | collective.site


def _in_loop(detail: int) -> bool:
    """Whether the collective that has won stands in the body of a training loop."""
    return not detail >> _SITE_BITS & 1
