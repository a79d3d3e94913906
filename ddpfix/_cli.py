"""``python -m ddpfix``: starts a program with ddpfix switched on, in it and in every Python process that it starts.

It replaces itself by a fresh interpreter (``exec``) that has the bootstrap directory on ``PYTHONPATH``. Running the program in this
process (``runpy``) would differ from ``python script.py``: frames of ours in each traceback, a ``__main__`` that is ours again when
threads and atexit handlers of the script pickle, and children that know nothing of ddpfix.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import ddpfix
from ddpfix import _switches

USAGE = """\
usage: python -m ddpfix train.py [arguments]         run a script with ddpfix switched on
       python -m ddpfix -m package.train [arguments] run a module with ddpfix switched on
       torchrun [options] -m ddpfix train.py [arguments]

       python -m ddpfix --path      print the directory to put on PYTHONPATH for the same effect
       python -m ddpfix --status    print what a bug report needs
       python -m ddpfix --version   print the version
       python -m ddpfix --help      print this text

environment:
"""

_can_exec = os.name != "nt"  # there, exec starts a second process and ends this one, so that the caller waits for the wrong one


def main(arguments: Sequence[str]) -> int:
    """Does what the command line says.

    Arguments:
        arguments (Sequence[str]): the command line without the program's name.

    Returns:
        The exit code, unless a program was started: then the call does not return.
    """
    first, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if first in _ACTIONS:
        if rest:
            return _refuse(f"{first} takes no arguments, got {rest[0]!r}.")
        print(_ACTIONS[first]())
        return 0
    if first == "-m":
        if not rest:
            return _refuse("-m needs the name of a module, as in `python -m ddpfix -m package.train`.")
        if not _is_runnable_module(rest[0]):
            return _refuse(
                f"there is no module {rest[0]!r} to run; -m takes the full name of a module, or of a package with a __main__."
            )
        return _start(["-m", *rest])
    if not first or (first.startswith("-") and first != "-"):  # a lone "-" is Python's name for a program on standard input
        what = f"unknown option {first!r}" if first else "nothing to run"
        return _refuse(f"{what}; valid are a Python script, -m and a module, {', '.join(_ACTIONS)}.")
    if first != "-" and not os.path.exists(first):
        return _refuse(f"there is no script {first!r}; valid are the path of a Python script, or -m and the name of a module.")
    return _start([first, *rest])


def bootstrap_directory() -> str:
    """Returns the directory with our sitecustomize.py."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")


def _start(target: list[str]) -> int:
    if not sys.executable:
        return _refuse("Python does not know the path of its own interpreter; write `import ddpfix` at the top of the script instead.")
    if sys.flags.ignore_environment or sys.flags.no_site:
        return _refuse(
            "python -I, -E and -S keep PYTHONPATH or sitecustomize from the program; run without them, or write `import ddpfix` at "
            "the top of the script instead."
        )
    command = [sys.executable, *_interpreter_options(), *target]
    environment = dict(os.environ)
    environment["PYTHONPATH"] = _with_bootstrap(environment.get("PYTHONPATH", ""))
    environment[_switches.LAUNCHED_BY] = "python -m ddpfix"
    if _can_exec:
        os.execve(sys.executable, command, environment)

    import subprocess

    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            pass  # the program got it as well, and decides


def _with_bootstrap(python_path: str) -> str:
    own = os.path.realpath(bootstrap_directory())
    # An empty entry means the current directory, so an empty PYTHONPATH must not become one.
    others = [path for path in python_path.split(os.pathsep) if os.path.realpath(path) != own] if python_path else []
    return os.pathsep.join([bootstrap_directory(), *others])


def _interpreter_options() -> list[str]:
    """Returns the options of this interpreter for the next one: those before ``-m ddpfix``."""
    # Everything, in the user's own words, since Python 3.10.
    original = list(getattr(sys, "orig_argv", ()))
    count = len(original) - (len(sys.argv) - 1)
    if original and original[count:] == sys.argv[1:]:
        options = original[1:count]
        if options[-1:] == ["ddpfix"]:
            options = options[:-1]
        elif options and options[-1].endswith("mddpfix"):  # -mddpfix
            options[-1] = options[-1][: -len("ddpfix")]
        if options and options[-1].startswith("-") and options[-1].endswith("m"):  # also -um
            return options[:-1] if options[-1] == "-m" else [*options[:-1], options[-1][:-1]]
    # Else (another program has run this module, or Python 3.9) what can be read from the interpreter's state.
    import subprocess

    options = list(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]
    # Not among those; torchrun relies on it to have the output of a rank at once.
    if getattr(sys.stdout, "write_through", False):
        options.append("-u")
    return options


def _is_runnable_module(name: str) -> bool:
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    spec = _find_without_import(name)
    if spec is None and "." in name:
        # A package can extend its __path__ when it is imported. Only where the look from outside has failed.
        import importlib.util

        try:
            spec = importlib.util.find_spec(name)
        except Exception:
            return False
    if spec is not None and spec.submodule_search_locations is not None:
        return _is_runnable_module(f"{name}.__main__")
    return spec is not None


def _find_without_import(name: str) -> Any:
    """Finds a module without importing its parents, for what they do on import is for the program's own process."""
    path: Sequence[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        partial = ".".join(parts[:count])
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(partial, path)
            if spec is not None:
                break
        else:
            return None
        path = spec.submodule_search_locations
        if path is None and count < len(parts):
            return None
    return spec


def _help() -> str:
    rows = [f"  {name:16} {meaning} ({values}; default {default or 'empty'})" for name, values, default, meaning in _switches.TABLE]
    return USAGE + "\n".join(rows)


def _version() -> str:
    return f"ddpfix {ddpfix.__version__}"


def _status() -> str:
    """Describes this process after an attempt to import torch, as ``key: value`` lines."""
    import platform

    lines: list[tuple[str, object]] = []
    problem = {name: _problem_of_import(name) for name in ("torch", "wrapt")}
    if ddpfix._switched_on_by == "import":
        ddpfix._switched_on_by = "python -m ddpfix"
    state: dict[str, Any] = ddpfix.status()
    lines.append(("ddpfix", f"{state['ddpfix']} in {os.path.dirname(os.path.abspath(__file__))}"))
    lines.append(("python", f"{state['python']} at {sys.executable}"))
    lines.append(("platform", platform.platform()))
    for name in ("torch", "wrapt"):
        lines.append((name, problem[name] or state[name]))
    lines.extend(_torch_lines())
    lines.append(("switched on by", state["switched_on_by"]))
    lines.extend((name, _switch_words(value)) for name, value in state["switches"].items())
    known = {*state["switches"], _switches.LAUNCHED_BY}
    lines.extend((name, "unknown, ignored") for name in sorted(os.environ) if name.startswith("DDPFIX") and name not in known)
    lines.extend((f"patch {name}", value) for name, value in state["patches"].items())
    return "\n".join(f"{name}: {value}" for name, value in lines)


def _switch_words(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list):
        return ",".join(value)
    return "" if value is None else str(value)


def _problem_of_import(name: str) -> str | None:
    import importlib

    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation is exactly what this text is to report
        return f"cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
    return None


def _torch_lines() -> list[tuple[str, object]]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return []

    def ask(question: Callable[[], object]) -> object:
        try:
            return question()
        except Exception as error:
            return f"unknown ({type(error).__name__})"

    lines = [
        ("torch.distributed", ask(torch.distributed.is_available)),
        ("cuda", ask(lambda: torch.version.cuda)),
        ("gpus", ask(torch.cuda.device_count)),
    ]
    if ask(lambda: torch.distributed.is_nccl_available()) is True:
        lines.append(("nccl", ask(lambda: ".".join(map(str, torch.cuda.nccl.version())))))
    return lines


_ACTIONS: dict[str, Callable[[], str]] = {
    "--path": bootstrap_directory,
    "--status": _status,
    "--version": _version,
    "--help": _help,
    "-h": _help,
}


def _refuse(sentence: str) -> int:
    print(f"ddpfix: {sentence}", file=sys.stderr)
    return 2
