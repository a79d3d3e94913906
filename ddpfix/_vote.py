"""The protocol: a vote before what is already a collective.

All ranks of a process group have to meet before a synchronised backward, before
a buffer broadcast or a bucket rebuild in a forward, and before each collective
of the script. Right before each of these a rank votes: one all-reduce (MIN) of a
few integers. The smallest code wins, and the winner is what everybody does next:
those who voted for it perform it, the others shadow it and vote again.

Three votes the script has not asked for: at the end of a training loop, when a rank
leaves, and before the next batch of a loop that all ranks end together. They are
soft: they lose to all others, and a voter without an answer goes on as without them.

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
from datetime import timedelta
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
    NEXT_BATCH = 3
    LOOP_END = 4
    LEAVING = 5


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
        trains: gradients are enabled.
    """

    fresh: bool
    model: int
    rebuild: bool
    buffers: bool
    sync: bool
    trains: bool


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
        timeout: seconds that the call itself would wait for the others; ``None``
            for the process group's own timeout.
    """

    site: int
    signature: int
    call: Callable[[], Call]
    in_loop: Optional[bool] = None
    of_loop: bool = False
    ended: Optional[int] = None
    timeout: Optional[float] = None


class Model(Protocol):
    """What the protocol asks of a model (:class:`ddpfix._shadow.Shadow`)."""

    @property
    def gone(self) -> bool: ...
    @property
    def missed_first_iteration(self) -> bool: ...
    def shadow_backward(self) -> None: ...
    def shadow_forward(self, forward: Forward, source: int) -> None: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...


class _Unanswered(Exception):
    """The other ranks did not, or will not, answer a vote."""

    def __init__(self, text: str, level: int = logging.WARNING) -> None:
        super().__init__(text)
        self.level = level


class _Ballot(NamedTuple):
    """One result (or one rank's vote): the integers that are reduced, unpacked."""

    kind: Kind
    detail: int
    rank: int  # lowest rank that voted for the winner
    source: int  # lowest rank that is up to date
    behind: bool  # some rank has shadowed a backward and not caught up since
    one_kind: bool  # all ranks are about to do the same kind of thing
    asking: bool  # some rank asks whether all have a next batch
    leaving: bool  # some rank is leaving
    joined: bool  # some rank has shadowed a step, or mirrored a call, during its present wait
    one_signature: bool  # the collectives, or the forwards, that ranks are at fit together
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
_kept_for_good: Deque[torch.Tensor] = deque(maxlen=64)


class Rendezvous:
    """The meeting of the ranks of one process group.

    Arguments:
        group: the process group of the DDP models.
        device: where votes are reduced.
        catch_up: makes all ranks equal to one that is up to date; called on
            every rank with that rank (in ``group``), the models that every rank
            still has, and those of them whose static graph must begin anew.
        mirror: takes part in a collective of others.
        keeps: tells which broadcasts this rank could repeat.
        passes: tells how many passes over training data have run out of batches.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        catch_up: Callable[[int, List[Model], List[Model]], None],
        mirror: Callable[[Call], None],
        keeps: Callable[[], Tuple[Tuple[int, int], ...]],
        passes: Callable[[], int],
    ) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.models: Dict[int, Model] = {}  # by number, in order; those that are gone are left out
        self.models_made = 0
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
        self.trained: Dict[int, int] = {}  # synchronised steps of this rank, by model
        self.shadowed: Dict[int, int] = {}  # steps of others
        self._steps_of_gone = (0, 0)
        self.seconds_waited = 0.0  # of these, the seconds that this rank has spent on them
        self._told: Tuple[int, int, float] = (0, 0, 0.0)  # what of this the log knows
        # For who watches the waits: the last vote in words, and since when its result is waited for.
        self.last_vote: Callable[[], str] = lambda: "has not voted yet"
        self.waiting_since: Optional[float] = None
        # No rank shadows another for want of batches: all end their training loops with the first that runs out.
        self.stops_together = False
        # Why, if nobody has asked for it: then the log says at WARNING what is dropped.
        self.why_together: Optional[str] = None
        self._behind = False
        self._catch_up = catch_up
        self._mirror = mirror
        self._keeps = keeps
        self._passes = passes
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
        # A step of others, by its model, that began while this rank asked for its batch. All ranks have one, for
        # all that is known, so this rank's own step pairs with it, as without ddpfix; if none comes, it is shadowed.
        self._owed: Optional[int] = None
        self._warned_in_loop = False
        # A collective of this rank's that may have paired with one that it was not meant to.
        self._doubtful: Optional[str] = None

    def add(self, model: Model) -> int:
        """Number a model: the ranks of a process group construct their DDP models in one order.

        Returns:
            The number.
        """
        for number, other in list(self.models.items()):
            if other.gone:  # a script may make thousands
                del self.models[number]
                gone = (self.trained.pop(number), self.shadowed.pop(number))
                self._steps_of_gone = (self._steps_of_gone[0] + gone[0], self._steps_of_gone[1] + gone[1])
        number = self.models_made
        self.models_made += 1
        self.models[number] = model
        self.trained[number] = self.shadowed[number] = 0
        self._hold(number)
        self.open = True
        return number

    @property
    def steps_trained(self) -> int:
        """Synchronised steps of this rank, with all models."""
        return self._steps_of_gone[0] + sum(self.trained.values())

    @property
    def steps_shadowed(self) -> int:
        """Steps of others that this rank has shadowed, with all models."""
        return self._steps_of_gone[1] + sum(self.shadowed.values())

    def may_be_needed(self) -> None:
        """Others may be training, with or without a word of this rank: it leaves with them, and keeps the models until then."""
        self.open = True
        for model in self.models:
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
        if self._owed == model:
            self._owed = None  # the others have voted for it already
            return
        self._pay()
        self._cast(Kind.BACKWARD, model)

    def forward(self, forward: Callable[[], Forward]) -> Tuple[int, bool]:
        """Meet before the collective part of a forward.

        Arguments:
            forward: tells what is collective in the forward, at each vote anew: to
                shadow a backward meanwhile can make the bucket rebuild due.

        Returns:
            The rank in the process group that buffers are to be taken from, and whether all ranks
            are at this forward.
        """
        try:
            result = self._attend(Kind.FORWARD, forward=forward)
        except _Unanswered as error:
            self._go_alone("in the forward of a model", error)
            result = None
        return (result.rank, result.one_kind and result.one_signature) if result is not None else (0, False)

    def collective(self, collective: Collective) -> None:
        """Meet before a collective of the script; returns when it is this rank's turn to call it.

        Raises:
            CollectiveMismatchError: the ranks are at collectives that cannot meet.
        """
        try:
            self._attend(Kind.COLLECTIVE, collective=collective)
        except _Unanswered as error:
            call = collective.call()
            self._go_alone(f"at {call.name} at {call.where}", error)
        site, step = collective.site, self.steps_trained
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

    def next_batch(self, where: str, left: Optional[int], timeout: float) -> bool:
        """Agree whether all ranks have a next batch; nobody shadows for want of one.

        Arguments:
            where: the place in the script, for the log.
            left: batches that this rank has left, that one included; ``None`` if that is not known.
            timeout: seconds to wait for the others.

        Returns:
            Whether this rank is to have its batch. If not, the loops of all ranks end here.
        """
        if self._owed is not None:
            return True
        try:
            result = self._attend(Kind.NEXT_BATCH, where=f"gets its next batch at {where}", left=left, patience=timeout)
        except _Unanswered as error:
            self._go_alone("before the next batch", error)
            return True
        if result is None:
            self._loop_has_ended()
        return result is not None

    def loop_end(self, where: str, loop: Optional[int], timeout: float) -> None:
        """Shadow the others until nobody is at a training step.

        That the others do not answer is no error of a rank that has trained its
        own steps: it goes on, and fails, if at all, where it would without ddpfix.

        Arguments:
            where: the place in the script, for the log.
            loop: hash of the loop.
            timeout: seconds to wait for one vote of the others.

        Raises:
            CollectiveMismatchError: the others call a collective in their loop that
                this rank cannot take part in.
        """
        try:
            self._attend(Kind.LOOP_END, where=f"ended its training loop at {where}", ended=loop, patience=timeout)
        except _Unanswered as error:
            self._go_alone("at the end of the loop", error)
            self._joined = False
        else:
            self._loop_has_ended()

    def _loop_has_ended(self) -> None:
        self._met()
        self._joined = False

    def leave(self, patience: float, others_left: Callable[[], bool]) -> None:
        """Shadow the others until all leave.

        Arguments:
            patience: seconds to wait for one vote of the others at the most.
            others_left: whether some other rank has left for good, so that
                nobody can answer.
        """
        shadowed = self.steps_shadowed
        try:
            if others_left():
                raise _Unanswered("they have left already", logging.INFO)
            self._attend(
                Kind.LEAVING, patience=patience, nobody_comes=others_left, where="is leaving the process group"
            )
        except _Unanswered as error:
            self.dissolved = f"it has left without the others ({error})"
            logger.log(
                logging.WARNING if self._behind else error.level,
                "ddpfix: rank %d has ended its part of the training and leaves without the others, which do not answer (%s, see DDPFIX_PATIENCE); %s",
                self.rank,
                error,
                self._what_it_lacks() if self._behind else "this matters only if they still train",
            )
        else:
            shadowed = self.steps_shadowed - shadowed
            if shadowed:
                logger.warning(
                    "ddpfix: when rank %d had come to its end, others still trained %d steps. Its model has them now, but what it "
                    "saved or computed after its last step lacks them; a barrier() right after the training loop would have waited",
                    self.rank,
                    shadowed,
                )
        self._met()

    def dissolve(self, reason: str, level: int = logging.INFO) -> None:
        """Vote no more on this group; everything on it is stock from here on."""
        if self.dissolved is None:
            self.dissolved = reason
            logger.log(level, "ddpfix: rank %d goes on as without ddpfix on this process group: %s", self.rank, reason)

    def _go_alone(self, doing: str, error: _Unanswered) -> None:
        text = f"{doing}, it got no answer from the others ({error})"
        if self._behind:  # it must not pass its model for the final one
            raise RuntimeError(f"ddpfix: rank {self.rank}: {text}; {self._what_it_lacks()}") from error.__cause__
        self.dissolve(text, error.level)

    def _what_it_lacks(self) -> str:
        return f"its model lacks the last steps of the others, of which it has shadowed {self.steps_shadowed}"

    def _hold(self, model: int) -> None:
        self._held.add(model)
        self.models[model].hold()

    def _met(self) -> None:
        self.open = False
        for number in self._held:
            if number in self.models:
                self.models[number].release()
        self._held.clear()

    # -- rounds ----------------------------------------------------------------

    def _attend(
        self,
        kind: Kind,
        forward: Optional[Callable[[], Forward]] = None,
        collective: Optional[Collective] = None,
        patience: Optional[float] = None,
        nobody_comes: Callable[[], bool] = lambda: False,
        where: str = "",
        ended: Optional[int] = None,
        left: Optional[int] = 0,
    ) -> Optional[_Ballot]:
        """Vote, and shadow what wins, until it is this rank's turn.

        Arguments:
            kind: of the vote.
            forward, collective: what it is about, where it is a forward or a collective.
            patience: seconds to wait for a result; ``None`` for as long as what it is about would wait.
            nobody_comes: whether there will be none.
            where: where this rank stands, in words, if it calls nothing.
            ended: the loop that has ended.
            left: batches that are dropped if all loops end now; ``None`` if that is not known.

        Returns:
            The result that it goes on with; ``None`` if there is nothing left to do: nothing collective in the
            forward, or no next batch for any rank.

        Raises:
            _Unanswered: there was no result.
        """
        mine = None
        told_that_it_stays = False
        timeout = collective.timeout if collective is not None else None
        if patience is not None:
            # On a device, giving up is this thread's affair: a work that times out there takes the process with it. On
            # the CPU the vote should not outlive it by much, for the process cannot end as long as it is under way.
            timeout = patience + 1 if self.device.type == "cpu" else 2 * patience + 60
        started = time.monotonic()
        self.last_vote = lambda: _words(where, collective) + (" and is shadowing" if self._joined else "")
        while True:
            detail = 0
            if forward is not None:
                mine = forward()
                if not (mine.rebuild or mine.buffers):
                    return None
                if self._owed is not None:
                    self._pay()
                    continue  # a bucket rebuild may be due now
                detail = _pack_forward(mine, self._behind)
            else:
                self._pay()
                if collective is not None:
                    detail = _pack_collective(collective, self._joined)
            self.waiting_since = time.monotonic()
            try:
                work, tensor = self._cast(kind, detail, collective, timeout)
                if patience is not None and (kind is Kind.LEAVING or self.device.type != "cpu"):
                    _await(work, patience, nobody_comes)
                work.wait()
                numbers = tensor.tolist()  # with NCCL, the wait is here
            except RuntimeError as error:  # the process group's own: a timeout, a closed connection
                raise _Unanswered(str(error).strip().split("\n")[0]) from error
            finally:
                self.waiting_since = None
            self._forget_old_votes()
            result = _unpack(numbers)
            self.leaves_together |= result.leaving or result.joined

            if kind is Kind.LEAVING and not (result.kind is kind or told_that_it_stays):
                told_that_it_stays = True
                logger.info(
                    "ddpfix: rank %d has ended its part of the training, and shadows the other ranks until they have ended theirs; "
                    "it waits up to %g seconds for each of their steps (DDPFIX_PATIENCE)",
                    self.rank,
                    patience,
                )

            if result.kind is Kind.BACKWARD:
                if kind is Kind.NEXT_BATCH and not self._behind:
                    self._owed = result.detail
                    self.open = True
                    return result
                self._shadow_backward(result.detail)
                if kind is not Kind.FORWARD:
                    self._warn_of_doubtful()
                if collective is not None and collective.in_loop and not self._warned_in_loop:
                    self._warn_in_loop(collective)
                now = time.monotonic()
                self.seconds_waited += now - started
                started = now
                continue

            if result.kind is Kind.FORWARD:
                winner, behind = _unpack_forward(result.detail)
                if winner.trains and result.asking:
                    # Who asks has a batch, and comes to its own forward with it, as without ddpfix.
                    if result.behind:
                        self._all_catch_up(result)
                    if kind is Kind.NEXT_BATCH:
                        return result
                    continue
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
                if result.kind is Kind.NEXT_BATCH and not result.one_kind:
                    self._tell_what_is_dropped(left, kind)
                    if kind is Kind.NEXT_BATCH:
                        return None
                    if kind is Kind.LOOP_END:
                        return result  # this rank's loop has ended, and so have those of the others now
                if result.kind is kind:
                    return result
                continue  # the others are at their loop end, and go; this rank leaves later

            if result.one_kind and result.one_signature and not (result.joined or result.behind):
                # Nobody has shadowed a step: today's pairing, whatever the call sites.
                if not result.one_site and collective is not None:
                    self._note_doubtful(collective, result)
                return result

            # One vote cannot carry what must be known now, so it is told in full.
            report = Report(
                rank=dist.get_rank(),
                call=collective.call() if collective is not None else None,
                leaving=kind is Kind.LEAVING,
                joined=self._joined,
                where=where,
                knows=tuple(self._sites.items()),
                keeps=self._keeps(),
                ended=collective.ended if collective is not None else ended,
                has_batch=kind is Kind.NEXT_BATCH,
                passes=self._passes(),
            )
            role = self._confer(report, result, left, kind)
            if role is Role.ENDS:
                return None
            if role in (Role.CALLS, Role.GOES):
                return result

    def _confer(self, report: Report, result: _Ballot, left: Optional[int], kind: Kind) -> Role:
        """Tell all ranks in full where each stands, decide, and do what there is to do for the others.

        Raises:
            CollectiveMismatchError: the ranks are at collectives that cannot meet.
        """
        told = self._exchange({"report": to_json(report), "behind": self._behind})
        reports = [from_json(one["report"]) for one in told]
        decision = decide(reports)
        role = decision.roles[self.rank]
        logger.debug("rank %d, %s: %s", report.rank, role.name, reports)
        goes_on = (Role.CALLS, Role.GOES, Role.ENDS)
        if any(one["behind"] and each in goes_on for one, each in zip(told, decision.roles)):
            self._all_catch_up(result)
        if all(each is Role.CALLS for each in decision.roles):
            self._joined = False
        if Role.ENDS in decision.roles:
            self._tell_what_is_dropped(left, kind)
        if role is Role.FAILS:
            raise CollectiveMismatchError(f"ddpfix: rank {report.rank}: {decision.error}.")
        if role is Role.GOES and decision.error:  # only a rank that is leaving comes here
            logger.warning("ddpfix: rank %d: %s", report.rank, decision.error)
        if role is Role.CALLS and report.has_run_out:
            self._warn_of_blind_pairing(report.call, decision.call)
        if role is Role.MIRRORS:
            assert decision.call is not None
            self._mirror(decision.call)
            self._joined = True
        return role

    def _pay(self) -> None:
        """Shadow the step that this rank has not taken part in with one of its own."""
        if self._owed is not None:
            model, self._owed = self._owed, None
            self._shadow_backward(model)

    def _shadow_backward(self, model: int) -> None:
        shadowed = self._model(model)
        self._hold(model)  # the others may train it again
        shadowed.shadow_backward()
        self.shadowed[model] += 1
        self._behind = self._joined = True

    def _model(self, number: int) -> Model:
        if number >= self.models_made:
            raise RuntimeError(
                f"ddpfix: another rank trains DistributedDataParallel model number {number} of this process "
                f"group, but rank {self.rank} has made {self.models_made}; all ranks must construct the "
                "same models in the same order, after ddpfix was imported"
            )
        if number not in self.models or self.models[number].gone:
            raise RuntimeError(
                f"ddpfix: another rank trains DistributedDataParallel model number {number}, which "
                f"this rank (rank {self.rank}) has already dropped after meeting the others; "
                "keep the model until all ranks have finished training it"
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

    def _warn_in_loop(self, collective: Collective) -> None:
        self._warned_in_loop = True
        call = collective.call()
        logger.warning(
            "ddpfix: rank %d waits in %s at %s, in its training loop, while others train steps without calling it, and shadows "
            "these. If not all ranks call it there, the script would hang without ddpfix, and trains something else with it",
            self.rank,
            call.name,
            call.where,
        )

    def _all_catch_up(self, result: _Ballot) -> None:
        if result.source >= self.world_size:
            raise RuntimeError(
                "ddpfix: every rank of the process group lacks steps that another one has trained; this "
                "happens when ranks train several models in different orders at the same time"
            )
        now = (self.steps_trained, self.steps_shadowed, self.seconds_waited)
        trained, shadowed, seconds = (new - old for new, old in zip(now, self._told))
        self._told = now
        for model in self.models.values():
            model.hold()  # those that are told to be there must be there in a moment
        there = [number for number, model in self.models.items() if not model.gone]
        told = self._exchange(
            {
                "models": there,
                "missed": [number for number in there if self.models[number].missed_first_iteration],
                "trained": trained,
                "shadowed": shadowed,
                "seconds": round(seconds, 1),
            }
        )
        # A rank may have made one more, or dropped one.
        common = [number for number in there if all(number in one["models"] for one in told)]
        missed = [number for number in common if any(number in one["missed"] for one in told)]
        self._catch_up(result.source, [self.models[n] for n in common], [self.models[n] for n in missed])
        for number in there:
            if number not in self._held:
                self.models[number].release()
        self._behind = False
        if self.rank == 0:
            logger.info(
                "ddpfix: uneven inputs, rank by rank: steps trained %s, steps of others shadowed %s, seconds spent on them %s",
                *([one[what] for one in told] for what in ("trained", "shadowed", "seconds")),
            )

    def _tell_what_is_dropped(self, left: Optional[int], kind: Kind) -> None:
        told = self._exchange({"left": left, "where": self.last_vote(), "has": kind is Kind.NEXT_BATCH})
        if self.rank == 0:
            logger.log(
                logging.INFO if self.why_together is None else logging.WARNING,
                "ddpfix: uneven inputs: the training loops of all ranks ended together, as %s%s; batches dropped, rank by rank: %s",
                " and ".join(f"rank {rank} {one['where']}" for rank, one in enumerate(told) if not one["has"]),
                "" if self.why_together is None else f", and {self.why_together}",
                ", ".join("at least 1" if one["left"] is None else str(one["left"]) for one in told),
            )

    def _cast(
        self,
        kind: Kind,
        detail: int = 0,
        collective: Optional[Collective] = None,
        timeout: Optional[float] = None,
    ) -> Tuple[Any, torch.Tensor]:
        ballot = _pack(kind, detail, self.rank, self.world_size, self._behind, self._joined, collective)
        tensor = self._on_device(ballot)
        work = all_reduce_min(self.group, tensor, timeout)
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
        # Without the works, which keep the connections and threads of the group.
        _kept_for_good.extend(tensor for _, tensor in self._votes_kept)
        self._votes_kept.clear()


def all_reduce_min(group: dist.ProcessGroup, tensor: torch.Tensor, timeout: Optional[float] = None) -> Any:
    """Reduce ``tensor`` over ``group``, below ``torch.distributed.all_reduce`` and its hooks; returns the work.

    Arguments:
        timeout: seconds until it gives up, instead of the group's timeout, where torch can do that.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
    if timeout is None:
        return group.allreduce([tensor], options)
    # Gloo takes it from here (ProcessGroupGloo.cpp; seen in torch 2.13, not yet in 2.1) ...
    options.timeout = timedelta(seconds=timeout)
    backend: Any = group._get_backend(tensor.device)
    # ... and NCCL from its options, at the moment of the call (ProcessGroupNCCL.cpp, initWork; settable since torch 2.3).
    usual = getattr(getattr(backend, "options", None), "_timeout", None)
    if tensor.device.type == "cpu" or usual is None or not hasattr(backend, "_set_default_timeout"):
        return group.allreduce([tensor], options)
    backend._set_default_timeout(options.timeout)
    try:
        return group.allreduce([tensor], options)
    finally:
        backend._set_default_timeout(usual)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> Optional[float]:
    """Seconds that a collective on ``device`` waits for the other ranks; ``None`` where torch does not tell.

    ``Backend.options._timeout``, torch 2.0 and up.
    """
    try:
        timeout = group._get_backend(device).options._timeout
    except Exception:
        return None
    return float(timeout.total_seconds()) if isinstance(timeout, timedelta) else None


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
    deadline, pause, asked, nobody = time.monotonic() + patience, 0.0005, 0.0, 0
    while not work.is_completed():
        now = time.monotonic()
        if now > deadline:
            raise _Unanswered(f"for {patience:g} seconds")
        if now - asked > 0.2:
            if nobody_comes():
                # The results of a vote that all have cast may be on their way still.
                nobody += 1
                if nobody > 5:
                    raise _Unanswered("they have left already", logging.INFO)
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
    collective: Optional[Collective] = None,
) -> List[int]:
    # All are reduced with MIN, so a flag that anyone may raise is 0 where raised. Of kinds
    # and hashes the smallest and the largest are found; ranks without a hash keep out of that.
    hashes = [_HASHES] * 4
    if collective is not None:
        hashes = [collective.signature, -collective.signature, collective.site, -collective.site]
    elif kind is Kind.FORWARD:
        hashes[:2] = [detail, -detail]
    return [
        (int(kind) << _DETAIL_BITS | detail) << _RANK_BITS | rank,
        -int(kind),
        world_size if behind else rank,
        0 if behind else 1,
        0 if kind is Kind.NEXT_BATCH else 1,
        0 if kind is Kind.LEAVING else 1,
        0 if joined else 1,
        *hashes,
    ]


def _unpack(numbers: List[int]) -> _Ballot:
    code, last, source, not_behind, not_asking, not_leaving, not_joined, *hashes = numbers
    kind = Kind(code >> _RANK_BITS >> _DETAIL_BITS)
    return _Ballot(
        kind,
        code >> _RANK_BITS & (1 << _DETAIL_BITS) - 1,
        code & (1 << _RANK_BITS) - 1,
        source,
        not not_behind,
        -last == kind,
        not not_asking,
        not not_leaving,
        not not_joined,
        hashes[0] == -hashes[1],
        hashes[2] == -hashes[3],
    )


def _pack_forward(forward: Forward, behind: bool) -> int:
    # A voter that is behind wins among equal forwards, so that all see that it must catch up first.
    return (
        int(forward.fresh) << (_DETAIL_BITS - 1)
        | forward.model << 5
        | int(not forward.rebuild) << 4
        | int(not forward.buffers) << 3
        | int(not forward.sync) << 2
        | int(not forward.trains) << 1
        | int(not behind)
    )


def _unpack_forward(detail: int) -> Tuple[Forward, bool]:
    return (
        Forward(
            bool(detail >> (_DETAIL_BITS - 1)),
            (detail & (1 << _DETAIL_BITS - 1) - 1) >> 5,
            not detail & 16,
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
