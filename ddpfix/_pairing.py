"""Which ranks perform a collective together, and what the others do meanwhile.

A vote carries a few integers. That is enough while all ranks train: then collectives pair exactly
as they do without ddpfix. Once some rank has run out of batches, or the ranks are about to call
collectives that cannot meet, all ranks tell each other in full where they stand (:class:`Report`),
and each comes to the same decision from the same reports (:func:`decide`). Nothing here
communicates, and nothing here knows torch.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple


class CollectiveMismatchError(RuntimeError):
    """The ranks stand at collectives that cannot meet; raised on all of them, where stock would hang.

    Either the script calls different collectives on different ranks, or a rank has run out of
    batches and cannot honestly take part in a collective that the others call from inside their
    training loop. The text names the ranks, their places in the script, and the way out.
    """

    __module__ = "ddpfix"  # where scripts find it


class Call(NamedTuple):
    """A collective that a rank is about to call.

    Arguments:
        name: of the function, ``"all_reduce"``.
        where: ``"train.py:57"``.
        site: hash of the place, with the places it was called from.
        signature: hash of everything that must be the same on all ranks for the call to work.
        mirror: what a rank needs to know to take part without anything of its own
            (:func:`ddpfix._collectives.take_part`); ``None`` where that is impossible.
        barrier: nothing but waiting is exchanged.
        alike: it treats all ranks alike, and exchanges something.
        group: name of its process group.
        asynchronous: it does not wait, so that calls on other groups may overtake it.
        in_loop: it stands in the body of a running training loop; ``None`` where that is not known.
        of_loop: a training loader of that rank has batches left.
        trains_on: it stands in a loop, which ends only with its batches, so that training is sure to go on after the call.
        loops: the ``for`` statements over DataLoaders that it stands in, and whether they are left only with
            their last batch.
        ran_dry: a training loader of that rank has run out of batches, and no step has followed.
        of_model: it is part of a model's forward.
        why_not: why it would not be honest; ``None`` where it is.
        reader: the only rank (global) that sees what the others contribute; ``None`` where all do.
        source: the only rank (global) whose contribution counts; ``None`` where all do.
    """

    name: str
    where: str
    site: int
    signature: int
    mirror: Optional[Dict[str, Any]] = None
    barrier: bool = False
    alike: bool = False
    group: str = ""
    asynchronous: bool = False
    in_loop: Optional[bool] = None
    of_loop: bool = False
    trains_on: bool = False
    loops: Tuple[Tuple[int, bool], ...] = ()
    ran_dry: bool = False
    of_model: bool = False
    why_not: Optional[str] = None
    reader: Optional[int] = None
    source: Optional[int] = None


class Report(NamedTuple):
    """Where one rank stands.

    Arguments:
        rank: global rank.
        call: the collective it is about to call, or ``None``.
        leaving: it has ended its training and is leaving the process group.
        joined: it has shadowed a step, or mirrored a call, of others since it began to wait.
        where: where it stands if it calls nothing, in words.
        knows: sites that it has called, and how often, as it seems, from inside its own training loop.
        keeps: site and signature of the broadcasts whose last value it could repeat.
        ended: the ``for`` statement of the training loop that has ended last on it, unless it has begun anew.
        has_batch: it asks whether all have a next batch, and has one itself.
        passes: over training loaders, that have run out of batches so far.
    """

    rank: int
    call: Optional[Call] = None
    leaving: bool = False
    joined: bool = False
    where: str = ""
    knows: Tuple[Tuple[int, int], ...] = ()
    keeps: Tuple[Tuple[int, int], ...] = ()
    ended: Optional[int] = None
    has_batch: bool = False
    passes: int = 0

    def calls_of(self, site: int) -> int:
        """How often it has called a site from inside its training loop."""
        return dict(self.knows).get(site, 0)

    @property
    def has_run_out(self) -> bool:
        """Whether it has no batches left, for all that is known; one that only accumulates may shadow a step, too."""
        return self.joined and not (self.call is not None and (self.call.in_loop or self.call.of_loop))

    @property
    def at_loop_end(self) -> bool:
        return self.call is None and not (self.leaving or self.has_batch)

    def words(self) -> str:
        if self.call is not None and self.joined:
            return f"rank {self.rank}, after it has shadowed steps of others, calls {self.call.name} at {self.call.where}"
        if self.call is not None:
            return f"rank {self.rank} calls {self.call.name} at {self.call.where}"
        return f"rank {self.rank} {self.where}"


class Role(Enum):
    """What a rank does after a decision."""

    CALLS = "performs its own call"
    MIRRORS = "takes part in the call of the others, with nothing of its own"
    GOES = "goes on: nothing that the others do needs it"
    ASKS = "votes again, after the ranks that go"
    ENDS = "ends its training loop, as another rank has"
    FAILS = "raises the error"


class Decision(NamedTuple):
    """What every rank does.

    Arguments:
        roles: one for each rank, in the order of the reports.
        call: the call that the mirroring ranks take part in.
        error: the text for ranks that fail.
    """

    roles: List[Role]
    call: Optional[Call] = None
    error: str = ""


def decide(reports: Sequence[Report]) -> Decision:
    """Decide who performs a collective; some rank calls one, and none is at a training step.

    Arguments:
        reports: one for each rank, the same and in the same order on every rank.
    """
    callers = [report for report in reports if report.call is not None]
    assert callers
    asking = [report for report in reports if report.has_batch]
    if asking:
        # Not all are at the head of their loops. If a rank that has run out sooner calls something that does not belong to
        # the loop, it is through. Else (a flag that tells who has run out; one more look at the data by one rank) it is no
        # time to ask, and each gets its batch.
        through = any(
            report.call.ran_dry
            and not report.call.in_loop
            and not any(one.calls_of(report.call.site) or one.passes >= report.passes for one in asking)
            for report in callers
            if report.call is not None
        )
        then = Role.ENDS if through else Role.GOES
        return Decision([then if report.has_batch else Role.ASKS for report in reports])
    # What those call that still train comes first.
    leader = min(callers, key=lambda report: _precedence(report, reports))
    call = leader.call
    assert call is not None
    uneven = any(report.joined for report in reports)

    def left_behind(report: Report) -> bool:
        """Whether the call comes from inside a loop that this rank has left."""
        if report.call is not None and report.call.in_loop:
            return False
        if call.in_loop or report.ended in dict(call.loops) or report.calls_of(call.site):
            return True
        # It has been there before, has run out, and now stands elsewhere: the others are there once more. Or they have
        # batches left. (A rank at its loop end is not behind its loop yet, where that place may be next.)
        beyond = report.has_run_out and not report.at_loop_end
        return beyond and (call.site in dict(report.knows) or call.of_loop and not leader.has_run_out)

    def same_way(report: Report) -> bool:
        """Whether as much speaks for the leader having left the loop of ``report``."""
        assert report.call is not None
        theirs = report.call.site
        if call.in_loop or report.has_run_out or not leader.calls_of(theirs):
            return False
        # Where loops cannot be seen, the end of each epoch looks like part of one; but it comes less often.
        return report.calls_of(call.site) <= report.calls_of(theirs)

    def in_step(report: Report) -> bool:
        """Whether both are in their loops, at places that the other one comes by, too, but not in the same step."""
        assert report.call is not None
        return report.calls_of(call.site) > 0 and leader.calls_of(report.call.site) > 0 and bool(
            call.in_loop and report.call.in_loop
        )

    def known_apart(report: Report) -> bool:
        """Whether something tells which of the two calls stands in a loop."""
        assert report.call is not None
        known = report.call.in_loop is not None or call.in_loop is not None
        return known or report.calls_of(call.site) != report.calls_of(report.call.site)

    # Ranks often call at different lines what has a root (``if rank == 0: gather(...) else: gather(...)``), or a barrier;
    # hardly ever what treats all alike. If one has shadowed a step of the other meanwhile, that one is in its loop.
    nobody_branches = call.alike and call.in_loop is not False

    # A rank at its loop end stays if the others are still in that loop. They surely are if they
    # have trained a step meanwhile. Otherwise they may be asking whether to stop (ESPnet's loop):
    # then its own answer comes next, from behind the loop, and it has to go and give it.
    def stays(report: Report) -> bool:
        surely = uneven or call.barrier or call.trains_on or (report.ended, True) in call.loops
        return surely and left_behind(report)

    goes = [report.at_loop_end and not stays(report) for report in reports]
    if any(goes):
        return Decision([Role.GOES if go else Role.ASKS for go in goes])

    roles: List[Role] = []
    for report in reports:
        theirs = report.call
        if theirs is None:
            # At its loop end and staying; or leaving, and then only needed by those still in a loop.
            needed = report.at_loop_end or call.barrier or left_behind(report)
            roles.append(Role.MIRRORS if needed else Role.GOES)
        elif (theirs.site, theirs.signature) == (call.site, call.signature):
            roles.append(Role.CALLS)
        elif theirs.signature == call.signature:
            # As without ddpfix, unless this rank has run out and the others have not.
            behind = report.has_run_out and not leader.has_run_out
            if behind and (left_behind(report) or nobody_branches):
                roles.append(Role.MIRRORS)
            elif report.joined != leader.joined and not behind and nobody_branches and not known_apart(report):
                return _fails(reports, _different(callers))
            else:
                roles.append(Role.CALLS)
        elif left_behind(report) and not same_way(report) or call.barrier and uneven:
            roles.append(Role.MIRRORS)
        elif (theirs.asynchronous or call.asynchronous) and theirs.group != call.group:
            roles.append(Role.CALLS)  # they are not meant to meet
        elif in_step(report):
            roles.append(Role.MIRRORS)
        else:
            return _fails(reports, _different(callers))

    if Role.GOES in roles:  # a rank that is leaving: the call cannot be completed
        gone = [report.words() for report, role in zip(reports, roles) if role is Role.GOES]
        text = f"{'; '.join(gone)}, but {_places(callers)}, for which all ranks are needed"
        if call.mirror is None and call.why_not is not None:
            text += f": {call.why_not}"
        return Decision([Role.GOES if r.call is None else Role.FAILS for r in reports], error=text)
    mirroring = [report for report, role in zip(reports, roles) if role is Role.MIRRORS]
    reason = _why_not(call, mirroring)
    if reason is not None:
        text = (
            f"{'; '.join(report.words() for report in mirroring)} and cannot take part when "
            f"{leader.words()}: {reason}. Give all ranks the same number of batches"
            + ("" if call.of_model else ", or make that call outside of the training loop")
        )
        return _fails(reports, text)
    return Decision(roles, call)


def _precedence(report: Report, reports: Sequence[Report]) -> Tuple[bool, int, int, bool, int, int]:
    call = report.call
    assert call is not None
    often = sum(other.calls_of(call.site) for other in reports)
    in_loop = call.in_loop or any(other.ended in dict(call.loops) for other in reports)
    inside = 0 if in_loop else 1 if call.in_loop is None else 2
    return (report.has_run_out, inside, -often, not call.barrier, call.site, report.rank)


def _why_not(call: Call, mirroring: Sequence[Report]) -> Optional[str]:
    if not mirroring:
        return None
    if call.mirror is None:
        return call.why_not or "its arguments are not known"
    if any(report.rank == call.reader for report in mirroring):
        return None  # the only rank that would see the contributions does not look
    for report in mirroring:
        if report.rank == call.source and (call.site, call.signature) not in report.keeps:
            return f"rank {report.rank} is the source, and has nothing that it sent from there before"
    return call.why_not


def _fails(reports: Sequence[Report], text: str) -> Decision:
    return Decision([Role.GOES if report.leaving else Role.FAILS for report in reports], error=text)


def _different(callers: Sequence[Report]) -> str:
    return (
        f"different collectives cannot meet: {_places(callers)}. All ranks must call the same "
        "collectives, with arguments that fit, in the same order"
    )


def _places(callers: Sequence[Report]) -> str:
    return ", ".join(report.words() for report in callers)


def to_json(report: Report) -> Dict[str, Any]:
    """What other ranks are told."""
    return {**report._asdict(), "call": report.call and report.call._asdict()}


def from_json(found: Dict[str, Any]) -> Report:
    """The inverse of :func:`to_json`, also after a passage through :mod:`json`, which knows no tuples."""
    call = found["call"]
    return Report(
        **{
            **found,
            "call": Call(**{**call, "loops": tuple(map(tuple, call["loops"]))}) if call is not None else None,
            "knows": tuple((site, number) for site, number in found["knows"]),
            "keeps": tuple((site, signature) for site, signature in found["keeps"]),
        }
    )
