"""What a process that ends is taken for: one that has come to its end, or one that fails. Each case is a script of its own."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from interpreters import python

ROOT = Path(__file__).resolve().parent.parent

#: Without torch, which takes seconds to import; ddpfix._leave needs none of it.
BEGIN = """
    import atexit, contextlib, sys, threading, types
    mine = sys.modules["mine"] = types.ModuleType("mine")
    exec("from sys import exit", vars(mine))  # before ddpfix came
    for name, thing in (("_store", "GroupStore"), ("_vote", "Rendezvous")):
        module = sys.modules[f"ddpfix.{name}"] = types.ModuleType(name)
        setattr(module, thing, object)
    from ddpfix import _leave, _patches

    at_exit = _leave.AtExit(lambda: print("leaves"), lambda: trains)
    trains = threading.get_ident()
    _leave.install(_patches.Places(), lambda: at_exit)

    def call(function, *arguments):
        return function(*arguments)

    def fail(status):
        raise SystemExit(status)

    def train_in_a_thread():
        def train():
            global trains
            trains = threading.get_ident()
            int("x")

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    at_exit.arm()
"""

#: The script's last words, its exit code, and whether it leaves as a rank that has come to its end.
CASES = {
    "": (0, True),
    "for i in range(2): print(end='')": (0, True),
    "with contextlib.suppress(ValueError): call(int, 'x')": (0, True),
    "sys.exit()": (0, True),
    "call(sys.exit, 0)": (0, True),
    "call(mine.exit)": (0, True),
    "exit()": (0, True),
    "call(quit, 0)": (0, True),
    "raise SystemExit(call(int))": (0, True),
    "with contextlib.suppress(SystemExit): fail(3)": (0, True),
    "assert not call(lambda: at_exit.in_error)": (0, True),
    "sys.exit(3)": (3, False),
    "call(mine.exit, 3)": (3, False),
    "call(exit, 3)": (3, False),
    "call(sys.exit, 'sorry')": (1, False),
    "fail(3)": (3, False),
    "with contextlib.suppress(ValueError): fail(3)": (3, False),
    "try: fail(3)\nfinally: print(end='')": (3, False),
    "call(int, 'x')": (1, False),
    "call(next, iter(()))": (1, False),
    # The script's own handlers run before and after.
    "atexit.register(lambda: print('fails' * at_exit.in_error, end='')); sys.exit(0)": (0, True),
    "at_exit.disarm(); atexit.register(lambda: print('fails' * at_exit.in_error, end='')); at_exit.arm()": (0, True),
    # Which thread trains, and how it ends.
    "trains = 1; threading.Thread(target=int, args=('x',)).start()": (0, True),
    "call(train_in_a_thread)": (0, False),
}


@pytest.mark.parametrize("words", CASES)
@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_who_leaves(tmp_path: Path, words: str, as_module: bool) -> None:
    code, leaves = CASES[words]
    (tmp_path / "script.py").write_text(textwrap.dedent(BEGIN) + words + "\n")
    how = ["-m", "script"] if as_module else [tmp_path / "script.py"]
    found = python(*how, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, code=code)
    assert found.stdout == "leaves\n" * leaves, found.stdout + found.stderr


@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize("words", ["fail(3)", "sys.exit(3)", "call(exit, 3)"])
def test_what_the_script_does_at_exit_knows_that_it_fails(tmp_path: Path, words: str, registered: str) -> None:
    begin, register = textwrap.dedent(BEGIN), "atexit.register(lambda: print(at_exit.in_error))\n"
    if registered == "before":
        begin = begin.replace("at_exit.arm()\n", register + "at_exit.arm()\n")
        register = ""
    (tmp_path / "script.py").write_text(begin + register + words + "\n")
    assert python(tmp_path / "script.py", env={"PYTHONPATH": str(ROOT)}, code=3).stdout == "True\n"
