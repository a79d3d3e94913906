"""The decision who performs a collective, as a table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddpfix._pairing import Call, Report, Role, decide, from_json, to_json

CALLS, MIRRORS, GOES, ASKS, ENDS, FAILS = Role.CALLS, Role.MIRRORS, Role.GOES, Role.ASKS, Role.ENDS, Role.FAILS
LOSS, STOP, METRIC, GATHER = 1, 2, 3, 4  # places in a script
PLAIN = {"name": "all_reduce"}


def call(rank: int, site: int, signature: int = 7, joined: bool = False, knows: Any = (), keeps: Any = (), **more: Any) -> Report:
    more = {"mirror": PLAIN, **more}
    return Report(rank, Call(f"collective {signature}", f"train.py:{site}", site, signature, **more), False, joined, "", knows, keeps)


def in_loop(rank: int, site: int = LOSS, **more: Any) -> Report:
    return call(rank, site, in_loop=True, **more)


def after_loop(rank: int, site: int = METRIC, **more: Any) -> Report:
    return call(rank, site, in_loop=False, **more)


def at_loop_end(rank: int, joined: bool = False, knows: Any = ((LOSS, 3),)) -> Report:
    return Report(rank, joined=joined, where="ended its training loop at train.py:9", knows=knows)


def leaving(rank: int, joined: bool = False, knows: Any = ()) -> Report:
    return Report(rank, leaving=True, joined=joined, where="is leaving the process group", knows=knows)


def has_batch(rank: int, knows: Any = (), passes: int = 0) -> Report:
    return Report(rank, where="gets its next batch at train.py:9", has_batch=True, knows=knows, passes=passes)


def ran_dry(rank: int, site: int = METRIC, passes: int = 1, **more: Any) -> Report:
    return call(rank, site, ran_dry=True, **more)._replace(passes=passes)


ROWS: dict[str, tuple[list[Report], list[Role]]] = {
    "one place": ([call(0, METRIC, joined=True), call(1, METRIC)], [CALLS, CALLS]),
    "one place, one rank still in the loop": ([call(0, LOSS, joined=True), in_loop(1)], [CALLS, CALLS]),
    # A rank at the end of a plain for.
    "the others went on training": ([at_loop_end(0, joined=True), in_loop(1)], [MIRRORS, CALLS]),
    "the others are asking whether to stop": ([at_loop_end(0), in_loop(1)], [GOES, ASKS]),
    "the others are sure to go on training": ([at_loop_end(0), in_loop(1, trains_on=True)], [MIRRORS, CALLS]),
    "the others are at a barrier of their loop": ([at_loop_end(0), in_loop(1, barrier=True)], [MIRRORS, CALLS]),
    "the others have left the loop too": ([at_loop_end(0, joined=True), after_loop(1)], [GOES, ASKS]),
    "not known to be in a loop, but known from mine": ([at_loop_end(0, joined=True), call(1, LOSS)], [MIRRORS, CALLS]),
    "neither": ([at_loop_end(0, joined=True), call(1, METRIC)], [GOES, ASKS]),
    "one at its end, one behind it, one in it": ([at_loop_end(0, joined=True), after_loop(1), in_loop(2)], [MIRRORS, CALLS, CALLS]),
    "as before, with different collectives": (
        [at_loop_end(0, joined=True), after_loop(1, signature=8), in_loop(2)],
        [MIRRORS, MIRRORS, CALLS],
    ),
    # A rank behind its loop whose end was not seen.
    "joined, the others in the loop": ([after_loop(0, joined=True), in_loop(1)], [MIRRORS, CALLS]),
    "joined, the others at a place known from my loop": (
        [call(0, METRIC, joined=True, knows=((LOSS, 3), (METRIC, 3))), call(1, LOSS)],
        [MIRRORS, CALLS],
    ),
    "the others have shadowed my last step while they accumulated, and have more": (
        [call(0, METRIC, signature=8, barrier=True, knows=((LOSS, 3),)), call(1, LOSS, joined=True, of_loop=True, knows=((LOSS, 3),))],
        [MIRRORS, CALLS],
    ),
    "joined, the others at a place where I was before": ([call(0, METRIC, joined=True, knows=((LOSS, 0),)), call(1, LOSS)], [MIRRORS, CALLS]),
    "at its loop end, the others at a place where it was before": (
        [at_loop_end(0, joined=True, knows=((METRIC, 0),)), call(1, METRIC)],
        [GOES, ASKS],
    ),
    "joined, the others at another place of something that treats all alike": (
        [call(0, METRIC, joined=True, alike=True), call(1, STOP, alike=True)],
        [MIRRORS, CALLS],
    ),
    "as before, but the others are known to be in no loop": (
        [after_loop(0, METRIC, joined=True, alike=True), after_loop(1, STOP, alike=True)],
        [CALLS, CALLS],
    ),
    "as before, but the joined one may have batches, too": (
        [call(0, METRIC, joined=True, of_loop=True, alike=True), call(1, STOP, of_loop=True, alike=True)],
        [FAILS, FAILS],
    ),
    "joined, and the others have batches left": ([call(0, METRIC, joined=True), call(1, STOP, of_loop=True)], [MIRRORS, CALLS]),
    "joined, the others at a place that I do not know": ([call(0, METRIC, joined=True), call(1, STOP)], [CALLS, CALLS]),
    "joined, the others behind the loop at another place": ([after_loop(0, joined=True), after_loop(1, STOP)], [CALLS, CALLS]),
    "both joined, on different sides of an if": (
        [after_loop(0, joined=True), after_loop(1, STOP, joined=True), in_loop(2)],
        [MIRRORS, MIRRORS, CALLS],
    ),
    "not joined, another collective, the others in the loop": ([after_loop(0, signature=8), in_loop(1)], [MIRRORS, CALLS]),
    "not joined, a stop flag": ([after_loop(0), in_loop(1, STOP)], [CALLS, CALLS]),
    # Nobody can tell who is ahead.
    "different collectives": ([call(0, METRIC), call(1, GATHER, signature=8)], [FAILS, FAILS]),
    "different collectives in the loop": ([in_loop(0), in_loop(1, GATHER, signature=8)], [FAILS, FAILS]),
    "different collectives, each knows the other's place": (
        [call(0, METRIC, knows=((LOSS, 3), (METRIC, 3))), call(1, LOSS, signature=8, knows=((LOSS, 3), (METRIC, 3)))],
        [FAILS, FAILS],
    ),
    "different collectives, one called less often: the end of an epoch": (
        [call(0, METRIC, knows=((LOSS, 3), (METRIC, 1))), call(1, LOSS, signature=8, knows=((LOSS, 3), (METRIC, 1)))],
        [MIRRORS, CALLS],
    ),
    "as before, with the numbers of the places the other way round": (
        [call(0, LOSS, knows=((METRIC, 3), (LOSS, 1))), call(1, METRIC, signature=8, knows=((METRIC, 3), (LOSS, 1)))],
        [MIRRORS, CALLS],
    ),
    "different collectives that do not wait": ([call(0, METRIC, asynchronous=True), call(1, GATHER, signature=8)], [FAILS, FAILS]),
    "different collectives that do not wait, on different groups": (
        [call(0, METRIC, asynchronous=True, group="a"), call(1, GATHER, signature=8, group="b")],
        [CALLS, CALLS],
    ),
    "both in a loop, one step apart, at places that both come by": (
        [in_loop(0, LOSS, knows=((LOSS, 3), (METRIC, 1))), in_loop(1, METRIC, signature=8, knows=((LOSS, 3), (METRIC, 1)))],
        [CALLS, MIRRORS],
    ),
    "the loop that this rank has left, before the first step of the others": (
        [at_loop_end(0, knows=())._replace(ended=5), call(1, LOSS, loops=((5, True),))],
        [MIRRORS, CALLS],
    ),
    "as before, but they may be asking whether to stop": (
        [at_loop_end(0, knows=())._replace(ended=5), call(1, LOSS, loops=((5, False),))],
        [GOES, ASKS],
    ),
    "another loop": ([at_loop_end(0, joined=True, knows=())._replace(ended=5), call(1, LOSS, loops=((6, True),))], [GOES, ASKS]),
    "behind the loop, and in it before the first step": (
        [after_loop(0, signature=8)._replace(ended=5), call(1, LOSS, loops=((5, True),))],
        [MIRRORS, CALLS],
    ),
    "not known to be in a loop, and known to be behind one": (
        [after_loop(0, LOSS, signature=8, knows=((METRIC, 1),)), call(1, METRIC)],
        [MIRRORS, CALLS],
    ),
    "a barrier and something else, uneven": ([call(0, METRIC, joined=True), call(1, STOP, signature=8, barrier=True)], [MIRRORS, CALLS]),
    "a barrier and something else, even": ([call(0, METRIC), call(1, STOP, signature=8, barrier=True)], [FAILS, FAILS]),
    # A rank that is leaving.
    "leaving, the others in the loop": ([leaving(0, joined=True), in_loop(1)], [MIRRORS, CALLS]),
    "leaving, the others at a place known from my loop": ([leaving(0, knows=((LOSS, 3),)), call(1, LOSS)], [MIRRORS, CALLS]),
    "leaving, the others behind the loop": ([leaving(0, joined=True), after_loop(1)], [GOES, FAILS]),
    "leaving, the others at a barrier": ([leaving(0), after_loop(1, barrier=True)], [MIRRORS, CALLS]),
    # What cannot be neutral.
    "no honest value": ([at_loop_end(0, joined=True), in_loop(1, why_not="no value")], [FAILS, FAILS]),
    "no honest value, while leaving": ([leaving(0, joined=True), in_loop(1, why_not="no value")], [GOES, FAILS]),
    "no honest value, but nobody reads it": ([at_loop_end(0, joined=True), in_loop(1, why_not="no value", reader=0)], [MIRRORS, CALLS]),
    "no honest value, read by another": ([at_loop_end(0, joined=True), in_loop(1, why_not="no value", reader=1)], [FAILS, FAILS]),
    "impossible": ([at_loop_end(0, joined=True), in_loop(1, mirror=None, reader=0)], [FAILS, FAILS]),
    "the source has sent it before": ([at_loop_end(0, joined=True)._replace(keeps=((LOSS, 7),)), in_loop(1, source=0)], [MIRRORS, CALLS]),
    "the source has never sent it": ([at_loop_end(0, joined=True), in_loop(1, source=0)], [FAILS, FAILS]),
    "the source has sent something else": ([at_loop_end(0, joined=True)._replace(keeps=((LOSS, 8),)), in_loop(1, source=0)], [FAILS, FAILS]),
    # Loops that end together: a rank has a next batch, and another one is at a collective.
    "one has a batch, the others go on": ([has_batch(0), call(1, METRIC)], [GOES, ASKS]),
    "one has a batch, the others have run out": ([has_batch(0), ran_dry(1)], [ENDS, ASKS]),
    "one has a batch, one has run out, one is in the loop": ([has_batch(0), ran_dry(1), in_loop(2)], [ENDS, ASKS, ASKS]),
    "one has a batch, the others tell that they have run out": ([has_batch(0, knows=((STOP, 3),)), ran_dry(1, STOP)], [GOES, ASKS]),
    "one looks at its batches once more": ([has_batch(0, passes=1), ran_dry(1)], [GOES, ASKS]),
    "an inner loader has run out": ([has_batch(0), ran_dry(1, in_loop=True)], [GOES, ASKS]),
    "another rank is the source": ([at_loop_end(0, joined=True), in_loop(1, source=1)], [MIRRORS, CALLS]),
}


@pytest.mark.parametrize("name", ROWS)
def test_roles(name: str) -> None:
    reports, expected = ROWS[name]
    decision = decide(reports)
    assert decision.roles == expected, decision
    if FAILS in expected:
        for report in reports:
            assert report.words() in decision.error
    # The rank's number does not matter, and what was told through json is the same.
    mirrored = [report._replace(rank=len(reports) - 1 - report.rank) for report in reversed(reports)]
    if all(report.call is None or report.call.reader is report.call.source is None for report in reports):
        assert decide(mirrored).roles == expected[::-1]
    assert decide([from_json(json.loads(json.dumps(to_json(report)))) for report in reports]) == decision
