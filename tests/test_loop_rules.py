"""What the bytecode of a loop tells: whether it can be left otherwise than by its last item."""

from __future__ import annotations

import dis
import inspect
import re
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from ddpfix._loop import _instructions, call_site, for_statement, place

found: list[bool] = []
around: list[bool] = []


class Asks:
    """An iterator that looks at the ``for`` that asks it."""

    def __init__(self) -> None:
        self.left = 2

    def __iter__(self) -> Asks:
        return self

    def __next__(self) -> int:
        statement = for_statement(sys._getframe(1))
        assert statement is not None
        instructions = _instructions(statement.frame.f_code)
        found.append(instructions.leaves_early(statement.start, statement.end))
        around.append(instructions.in_while(statement.start, statement.end))
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return self.left


def plain() -> None:
    for i in Asks():
        print(i)


def with_everything_but_a_way_out() -> None:
    for i in Asks():
        with nullcontext():
            for k in range(3):
                if k:
                    break
        if i:
            continue
        while i < 3:
            i += 1
        try:
            print(i)
        except ValueError:
            print("no")
    else:
        print("done")


def raises() -> None:
    for i in Asks():
        if i < 0:
            raise ValueError(i)


def breaks() -> None:
    for i in Asks():
        if i < 0:
            break
        print(i)


def breaks_first() -> None:
    for i in Asks():
        print(i)
        if i < -1:
            continue
        if i < -2:
            break


def breaks_in_a_with() -> None:
    for i in Asks():
        with nullcontext():
            if i < 0:
                break


def returns() -> Any:
    for i in Asks():
        if i < 0:
            return i
    return None


def returns_nothing() -> None:
    for i in Asks():
        if i < 0:
            return


def breaks_and_ends() -> None:
    while True:
        for i in Asks():
            if i < 0:
                break
        else:
            return


def in_a_while() -> None:
    step = 0
    while step < 2:
        for i in Asks():
            step += 1
            if step == 5:
                break


def in_a_while_true() -> None:
    while True:
        step = 0
        if step:
            continue
        for i in Asks():
            print(i)
        if not step:
            return


def in_a_for_in_a_while() -> None:
    step = 0
    while step < 1:
        for _ in range(1):
            for i in Asks():
                print(i)
        step += 1


def in_a_for_with_whiles_beside_it() -> None:
    for epoch in range(2):
        while epoch > 5:
            epoch += 1
        for i in Asks():
            while i > 5:
                i -= 1
        while epoch < -1:
            epoch += 1
        if epoch == 0:
            continue


def with_a_long_body(function: Any) -> Any:
    """The same function with so much in the loop that jumps around it need arguments above 255."""
    source = re.sub(r"^( +)for i in Asks\(\):$", r"\g<0>\n\1    _ = (" + "i, " * 400 + ")", inspect.getsource(function), flags=re.M)
    made = dict(globals())
    exec(compile(source, __file__, "exec"), made)
    assert any(i.opname == "EXTENDED_ARG" for i in dis.get_instructions(made[function.__name__]))
    return made[function.__name__]


LENGTHS = pytest.mark.parametrize("lengthen", [lambda function: function, with_a_long_body], ids=["short", "long"])


@LENGTHS
@pytest.mark.parametrize("function", [in_a_while, in_a_while_true])
def test_in_a_while(function: Any, lengthen: Any) -> None:
    function = lengthen(function)
    around.clear()
    function()
    assert around and all(around)


@LENGTHS
@pytest.mark.parametrize("function", [plain, returns, in_a_for_in_a_while, in_a_for_with_whiles_beside_it])
def test_in_no_while(function: Any, lengthen: Any) -> None:
    function = lengthen(function)
    around.clear()
    function()
    assert around and not any(around)


@LENGTHS
@pytest.mark.parametrize("function", [plain, with_everything_but_a_way_out, raises])
def test_left_only_by_its_last_item(function: Any, lengthen: Any) -> None:
    function = lengthen(function)
    found.clear()
    function()
    assert found == [False] * 3


@LENGTHS
@pytest.mark.parametrize("function", [breaks, breaks_first, breaks_in_a_with, returns, returns_nothing, breaks_and_ends])
def test_may_be_left_early(function: Any, lengthen: Any) -> None:
    function = lengthen(function)
    found.clear()
    function()
    assert found == [True] * 3


def where() -> tuple[int, str]:
    frame = sys._getframe(1)
    return call_site(frame), place(frame)


def through() -> tuple[int, str]:
    return where()


def test_one_line_called_from_two_places_is_two_sites_and_one_place() -> None:
    first, second = through(), through()
    again = [through() for _ in range(2)]
    assert first[0] != second[0] and first[1] == second[1] and first[1].startswith("test_loop_rules.py:")
    assert again[0] == again[1]
