"""How ddpfix is switched on and off: in which processes, at what cost, and that nothing else about them changes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path
from typing import Any

import pytest
from interpreters import BOOTSTRAP, ROOT, environment, path, python, write

from ddpfix import _arrival, _switches

# Prints how ddpfix came to this process, or None; in one write, because print() makes two of it under -u and ranks share a terminal.
HOW = r"import sys; sys.stdout.write('%s\n' % getattr(sys.modules.get('ddpfix'), '_switched_on_by', None))"


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Writes a script into a directory of its own and returns its path."""

    def make(source: str, name: str = "script.py") -> Path:
        return write(tmp_path / "scripts" / name, source)

    return make


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has no packages at all, and no ddpfix."""
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, with_pip=False)
    return directory / ("Scripts" if os.name == "nt" else "bin") / "python"


# ---- what it costs


def modules_of(*arguments: str, **changes: str | None) -> set[str]:
    lines = python(*arguments, "-c", "import sys; print(*sorted(sys.modules))", env=environment(**changes)).stdout
    return set(lines.split())


# The cost in counted modules instead of milliseconds; the standard library ones must be those that any interpreter has loaded.
OWN = {"ddpfix", "ddpfix._arrival", "ddpfix._switches", "__future__"}


def test_import_ddpfix_imports_four_small_modules() -> None:
    code = "import sys; before = set(sys.modules); import ddpfix; print(*sorted(set(sys.modules) - before))"
    # an editable install, if ddpfix is installed so here, has imported __future__ before
    assert set(python("-c", code).stdout.split()) | {"__future__"} == OWN


def test_a_process_with_the_bootstrap_that_never_imports_torch_imports_them_and_nothing_else() -> None:
    bare = modules_of()
    assert "sitecustomize" in modules_of(PYTHONPATH=path(BOOTSTRAP))
    assert modules_of(PYTHONPATH=path(BOOTSTRAP)) - bare <= OWN | {"sitecustomize"}


# ---- switches


def test_switches_by_default() -> None:
    switches = _switches.read({})
    assert (switches.enabled, switches.disabled, switches.loop_end) == (True, (), True)


@pytest.mark.parametrize("name, attribute", [("DDPFIX", "enabled"), ("DDPFIX_LOOP_END", "loop_end")])
def test_words_for_on_and_off(name: str, attribute: str) -> None:
    for word in ("1", "on", "true", "True", " ON ", ""):
        assert getattr(_switches.read({name: word}), attribute) is True, word
    for word in ("0", "off", "false", "FALSE", " off"):
        assert getattr(_switches.read({name: word}), attribute) is False, word


def test_list_of_disabled_patches() -> None:
    assert _switches.read({"DDPFIX_DISABLE": "join"}).disabled == ("join",)
    assert _switches.read({"DDPFIX_DISABLE": " Barrier, join,,join "}).disabled == ("barrier", "join")
    assert _switches.read({"DDPFIX_DISABLE": " , "}).disabled == ()


@pytest.mark.parametrize(
    "name, value, valid",
    [
        ("DDPFIX", "yes", ["1", "on", "true", "0", "off", "false"]),
        ("DDPFIX_LOOP_END", "2", ["1", "on", "true", "0", "off", "false"]),
        ("DDPFIX_DISABLE", "barrier,jion", ["barrier", "join"]),
    ],
)
def test_an_invalid_switch_is_one_sentence_with_the_valid_values(name: str, value: str, valid: list[str]) -> None:
    with pytest.raises(_switches.SwitchError) as caught:
        _switches.read({name: value})
    sentence = str(caught.value)
    assert name in sentence and repr(value) in sentence and "\n" not in sentence
    assert all(word in sentence for word in valid)


def test_every_switch_in_the_table_is_read_and_reported() -> None:
    assert [row[0] for row in _switches.TABLE] == list(_switches.read({}).as_dict())
    for name, _, default, _ in _switches.TABLE:
        assert _switches.read({name: default}).as_dict() == _switches.read({}).as_dict()
        with pytest.raises(_switches.SwitchError):
            _switches.read({name: "nonsense"})


@pytest.mark.parametrize("how", ["import", "submodule", "status", "run", "sitecustomize"])
def test_an_invalid_switch_ends_every_way_in_with_code_2(how: str, script: Any) -> None:
    ran = script("print('the script ran')")
    arguments = {
        "import": ["-c", "import ddpfix; print('ran')"],
        "submodule": ["-c", "import ddpfix._arrival; print('ran')"],
        "status": ["-m", "ddpfix", "--status"],
        "run": ["-m", "ddpfix", ran],
        "sitecustomize": [ran],
    }[how]
    env = environment(DDPFIX="maybe", PYTHONPATH=path(BOOTSTRAP) if how == "sitecustomize" else path())
    result = python(*arguments, env=env, code=2)
    assert result.stdout == ""
    assert result.stderr.strip().splitlines() == [f"ddpfix: {_switches._invalid('DDPFIX', 'maybe')}"]


@pytest.mark.parametrize("question", ["--path", "--help", "--version"])
def test_a_question_is_answered_whatever_the_switches_say(question: str) -> None:
    # PYTHONPATH="$(python -m ddpfix --path)" must not come out empty: the job would run without ddpfix, and hang.
    asked = python("-m", "ddpfix", question, env=environment(DDPFIX="maybe"))
    assert asked.stderr == ""
    assert asked.stdout == python("-m", "ddpfix", question, env=environment()).stdout != ""


FAKE_TORCH = """
    __version__ = "2.99"
"""


def test_switched_off_it_does_nothing(tmp_path: Path) -> None:
    write(tmp_path / "torch.py", FAKE_TORCH)
    code = """if True:
        import json, sys
        finders = list(sys.meta_path)
        import ddpfix
        assert sys.meta_path == finders
        import torch
        ddpfix.patch()
        assert "wrapt" not in sys.modules
        print(json.dumps(ddpfix.status()))
        ddpfix.unpatch()
    """
    for word, python_path in (("off", path(tmp_path)), ("0", path(BOOTSTRAP, tmp_path))):
        result = python("-c", code, env=environment(DDPFIX=word, PYTHONPATH=python_path))
        assert result.stderr == ""
        state = json.loads(result.stdout)
        assert (state["torch"], state["switched_on_by"], set(state["patches"].values())) == ("2.99", "off", {"disabled"})


# ---- the arrival of modules


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Writes a module that can be imported in this process under a name that no other test uses."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def make(source: str, name: str = "") -> str:
        name = name or f"arriving_{abs(hash(request.node.nodeid))}"
        write(tmp_path / f"{name.replace('.', '/')}.py", source)
        return name

    return make


def test_a_module_that_is_imported_already_arrives_at_once(module: Any) -> None:
    name = module("")
    __import__(name)
    calls: list[str] = []
    _arrival.when_imported(name, lambda: calls.append("arrived"))
    assert calls == ["arrived"]


def test_a_module_arrives_when_its_execution_has_ended_and_only_once(module: Any) -> None:
    import importlib

    name = module("end = 1")
    calls: list[object] = []
    _arrival.when_imported(name, lambda: calls.append((sys.modules[name].end, threading.get_ident())))
    assert calls == []
    thread = threading.Thread(target=__import__, args=(name,))
    thread.start()
    ident = thread.ident
    thread.join(30)
    assert calls == [(1, ident)]
    importlib.reload(sys.modules[name])
    del sys.modules[name]
    __import__(name)
    assert len(calls) == 1


def test_a_probe_for_the_module_is_no_arrival_and_does_not_lose_it(module: Any) -> None:
    import importlib.util

    name = module("")
    calls: list[int] = []
    _arrival.when_imported(name, lambda: calls.append(1))
    for _ in range(3):
        assert importlib.util.find_spec(name) is not None
    assert calls == []
    __import__(name)
    assert calls == [1]


def test_an_import_that_fails_is_no_arrival(module: Any) -> None:
    name = module("import sys\nif not hasattr(sys, '_let_it_pass'): raise RuntimeError('not now')")
    calls: list[int] = []
    _arrival.when_imported(name, lambda: calls.append(1))
    with pytest.raises(RuntimeError, match="not now"):
        __import__(name)
    assert calls == []
    sys._let_it_pass = True  # type: ignore[attr-defined]
    try:
        __import__(name)
    finally:
        del sys._let_it_pass  # type: ignore[attr-defined]
    assert calls == [1]


def test_a_failing_callback_is_logged_and_neither_stops_the_import_nor_the_other_callbacks(module: Any, caplog: Any) -> None:
    name = module("end = 1")
    calls: list[int] = []

    def fail() -> None:
        raise ValueError("of ddpfix's own making")

    _arrival.when_imported(name, fail)
    _arrival.when_imported(name, lambda: calls.append(1))
    assert __import__(name).end == 1
    assert calls == [1]
    assert [(record.name, record.levelname) for record in caplog.records] == [("ddpfix", "WARNING")]
    assert "of ddpfix's own making" in caplog.text


def test_a_half_imported_module_arrives_when_its_import_ends(module: Any) -> None:
    name = module("import time, sys\nsys._half.set()\nassert sys._go_on.wait(30)\nend = 1")
    sys._half, sys._go_on = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    try:
        importer = threading.Thread(target=__import__, args=(name,))
        importer.start()
        assert sys._half.wait(30)  # type: ignore[attr-defined]
        arrived = threading.Event()
        ends: list[bool] = []

        def callback() -> None:
            ends.append(hasattr(sys.modules[name], "end"))
            arrived.set()

        assert name in sys.modules and not _arrival.is_imported(name)
        _arrival.when_imported(name, callback)
        assert not arrived.wait(0.2)
        sys._go_on.set()  # type: ignore[attr-defined]
        assert arrived.wait(30)
        importer.join(30)
        assert ends == [True]
    finally:
        sys._go_on.set()  # type: ignore[attr-defined]
        del sys._half, sys._go_on  # type: ignore[attr-defined]


def test_the_module_keeps_its_own_loader(module: Any) -> None:
    from importlib.machinery import SourceFileLoader

    name = module("")
    _arrival.when_imported(name, lambda: None)
    spec = __import__(name).__spec__
    assert type(spec.loader) is SourceFileLoader
    assert vars(spec.loader).keys() == {"name", "path"}  # nothing of ours is left on it


@pytest.mark.parametrize("first, second", [("ddpfix", "wrapt"), ("wrapt", "ddpfix")])
def test_wrapt_hooks_on_the_same_module_run_too(first: str, second: str, tmp_path: Path) -> None:
    write(tmp_path / "arriving.py", "end = 1")
    steps = {
        "ddpfix": "ddpfix._arrival.when_imported('arriving', lambda: calls.append('ddpfix'))",
        "wrapt": "wrapt.register_post_import_hook(lambda module: calls.append('wrapt'), 'arriving')",
    }
    code = ["import ddpfix, importlib.util, wrapt", "calls = []", steps[first], steps[second]]
    code += ["importlib.util.find_spec('arriving')", "import arriving", "print(*sorted(calls), type(arriving.__loader__).__name__)"]
    assert python("-c", "\n".join(code), env=environment(PYTHONPATH=path(tmp_path))).stdout == "ddpfix wrapt SourceFileLoader\n"


def test_two_copies_of_ddpfix_wait_for_the_same_module(tmp_path: Path) -> None:
    """Each finder asks the other one."""
    write(tmp_path / "torch.py", FAKE_TORCH)
    code = """if True:
        import sys
        calls = []
        for _ in range(2):
            for name in [name for name in sys.modules if name.partition(".")[0] == "ddpfix"]:
                del sys.modules[name]
            import ddpfix._arrival
            ddpfix._arrival._waiting.clear()
            ddpfix._arrival.when_imported("torch", lambda finder=ddpfix._arrival._finder: calls.append(finder))
        import torch
        assert len(set(calls)) == len(calls) == 2 and torch.__version__ == "2.99"
    """
    python("-c", code, env=environment(PYTHONPATH=path(tmp_path)))


def test_a_submodule_arrives(module: Any, tmp_path: Path) -> None:
    module("", "arriving_package.__init__")
    module("inner = 1", "arriving_package.inner")
    calls: list[int] = []
    _arrival.when_imported("arriving_package.inner", lambda: calls.append(1))
    __import__("arriving_package")
    assert calls == []
    __import__("arriving_package.inner")
    assert calls == [1]


def test_a_lazily_loaded_module_arrives_when_it_is_really_executed(module: Any) -> None:
    import importlib.util

    name = module("value = 1")
    calls: list[int] = []
    _arrival.when_imported(name, lambda: calls.append(1))
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    assert calls == []
    assert lazy.value == 1
    assert calls == [1]


# ---- sitecustomize


def test_the_bootstrap_switches_on(tmp_path: Path) -> None:
    assert python("-c", HOW, env=environment(PYTHONPATH=path(BOOTSTRAP))).stdout == "sitecustomize\n"


@pytest.mark.parametrize("flag, active", [("-s", True), ("-B", True), ("-OO", True), ("-S", False), ("-E", False), ("-I", False)])
def test_interpreter_flags_with_the_bootstrap(flag: str, active: bool) -> None:
    result = python(flag, "-c", HOW, env=environment(PYTHONPATH=path(BOOTSTRAP)))
    assert result.stdout == ("sitecustomize\n" if active else "None\n")
    assert result.stderr == ""


def test_the_users_sitecustomize_runs_as_without_ddpfix(tmp_path: Path) -> None:
    write(tmp_path / "sitecustomize.py", "import sys\nprint('user', __name__, __file__, sys.modules[__name__].__spec__.origin)\nvalue = 7")
    code = "import sitecustomize; print(sitecustomize.value, sitecustomize.__file__)"
    alone = python("-c", code, env=environment(PYTHONPATH=path(tmp_path)))
    chained = python("-c", f"{HOW}; {code}", env=environment(PYTHONPATH=path(BOOTSTRAP, tmp_path)))
    assert alone.stdout.startswith("user sitecustomize")
    lines = chained.stdout.splitlines()
    assert lines[1] == "sitecustomize"
    assert [lines[0], *lines[2:]] == alone.stdout.splitlines()


def test_a_package_as_the_users_sitecustomize(tmp_path: Path) -> None:
    write(tmp_path / "sitecustomize" / "__init__.py", "from . import part")
    write(tmp_path / "sitecustomize" / "part.py", "print('part of', __package__)")
    assert python("-c", HOW, env=environment(PYTHONPATH=path(BOOTSTRAP, tmp_path))).stdout == "part of sitecustomize\nsitecustomize\n"


def test_an_error_in_the_users_sitecustomize_is_reported_as_ever_and_does_not_stop_ddpfix(tmp_path: Path) -> None:
    write(tmp_path / "sitecustomize.py", "raise RuntimeError('broken by its author')")
    alone = python("-c", "pass", env=environment(PYTHONPATH=path(tmp_path)))
    chained = python("-c", HOW, env=environment(PYTHONPATH=path(BOOTSTRAP, tmp_path)))
    assert "broken by its author" in alone.stderr
    assert chained.stderr == alone.stderr
    assert chained.stdout == "sitecustomize\n"


def test_a_sitecustomize_of_the_user_that_imports_ddpfix(tmp_path: Path) -> None:
    write(tmp_path / "sitecustomize.py", "import ddpfix")
    assert python("-c", HOW, env=environment(PYTHONPATH=path(tmp_path))).stdout == "import\n"
    assert python("-c", HOW, env=environment(PYTHONPATH=path(BOOTSTRAP, tmp_path))).stdout == "sitecustomize\n"


def test_the_bootstrap_imported_as_a_module_of_the_package_does_nothing(tmp_path: Path) -> None:
    """As tools do that import every module of a package."""
    write(tmp_path / "elsewhere" / "sitecustomize.py", "print('user')")
    code = f"import sys; sys.path.append({str(tmp_path / 'elsewhere')!r}); import ddpfix.bootstrap.sitecustomize; {HOW}"
    assert python("-c", code).stdout == "import\n"


def test_two_bootstraps_under_three_names_and_the_users(tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "ddpfix" / "bootstrap"
    shutil.copytree(BOOTSTRAP, copy)
    link = tmp_path / "link"
    link.symlink_to(BOOTSTRAP)
    write(tmp_path / "users" / "sitecustomize.py", "print('user')")
    for order in ([BOOTSTRAP, copy, link], [link, BOOTSTRAP, copy], [copy, link, BOOTSTRAP, link]):
        result = python("-c", HOW, env=environment(PYTHONPATH=path(*order, tmp_path / "users")))
        assert (result.stdout, result.stderr) == ("user\nsitecustomize\n", "")


def test_an_interpreter_without_ddpfix_does_not_notice_the_bootstrap(bare_python: Path, tmp_path: Path) -> None:
    write(tmp_path / "sitecustomize.py", "print('user')")
    env = environment(PYTHONPATH=os.pathsep.join([BOOTSTRAP, str(tmp_path)]))
    result = python("-c", HOW, env=env, executable=bare_python)
    assert (result.stdout, result.stderr) == ("user\nNone\n", "")


def test_a_checkout_found_by_the_current_directory_alone_reaches_the_program(bare_python: Path, tmp_path: Path, script: Any) -> None:
    write(tmp_path / "packages" / "wrapt.py", "")
    target = script(f"import sys\n{HOW}\nprint({str(ROOT)!r} in sys.path)")
    env = environment(PYTHONPATH=str(tmp_path / "packages"))
    result = python("-m", "ddpfix", target, cwd=ROOT, env=env, executable=bare_python)
    assert (result.stdout, result.stderr) == ("python -m ddpfix\nFalse\n", "")


def test_the_bootstrap_parses_in_old_interpreters() -> None:
    """They all read it: what follows is what Python 2.7 and 3.3 cannot parse."""
    import ast

    source = (Path(BOOTSTRAP) / "sitecustomize.py").read_text()
    tree = ast.parse(source)
    source.encode("ascii")
    for node in ast.walk(tree):
        assert not isinstance(
            node, (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal, ast.AsyncFunctionDef, ast.Await, ast.YieldFrom, ast.Starred)
        )
        if isinstance(node, ast.Raise):
            assert node.cause is None
        if isinstance(node, ast.FunctionDef):
            assert node.returns is None and not node.args.kwonlyargs and not node.args.posonlyargs
            assert all(argument.annotation is None for argument in node.args.args)
        if isinstance(node, (ast.Call,)):
            assert not (isinstance(node.func, ast.Name) and node.func.id == "print")


# ---- which processes it reaches

CHILDREN = """
    import multiprocessing, subprocess, sys
    {imported}

    def how(queue, name):
        queue.put((name, getattr(sys.modules.get("ddpfix"), "_switched_on_by", None)))

    if __name__ == "__main__":
        {imported_in_main}
        found = dict(main=getattr(sys.modules.get("ddpfix"), "_switched_on_by", None))
        for method in ("fork", "spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            process = context.Process(target=how, args=(queue, method))
            process.start()
            found.update([queue.get(timeout=50)])
            process.join()
        code = "import sys; print(getattr(sys.modules.get('ddpfix'), '_switched_on_by', None))"
        found["subprocess"] = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        print(*(found[name] for name in ("main", "fork", "spawn", "forkserver", "subprocess")), sep=", ")
"""

LAUNCHED = "python -m ddpfix"


@pytest.mark.skipif(sys.platform != "linux", reason="all start methods exist on Linux only")
@pytest.mark.parametrize(
    "activation, expected",
    [
        ("import", "import, import, import, import, None"),
        ("import in main", "import, import, None, None, None"),
        ("sitecustomize", ", ".join(["sitecustomize"] * 5)),
        ("launcher", ", ".join([LAUNCHED] * 5)),
        ("launcher -m", ", ".join([LAUNCHED] * 5)),
        ("both", ", ".join([LAUNCHED] * 5)),
    ],
)
def test_children(activation: str, expected: str, script: Any) -> None:
    own_import = activation in ("import", "both")
    source = CHILDREN.format(
        imported="import ddpfix" if own_import else "",
        imported_in_main="import ddpfix" if activation == "import in main" else "pass",
    )
    target = script(source)
    arguments = {
        "launcher": ["-m", "ddpfix", target],
        "both": ["-m", "ddpfix", target],
        "launcher -m": ["-m", "ddpfix", "-m", "script"],
    }.get(activation, [target])
    env = environment(PYTHONPATH=path(BOOTSTRAP) if activation == "sitecustomize" else path())
    assert python(*arguments, env=env, cwd=target.parent).stdout.strip() == expected


# ---- python -m ddpfix

PORTRAIT = """
    import json, os, pickle, sys, threading, atexit

    class Config:
        pass

    portrait = dict(
        argv=sys.argv,
        path0=sys.path[0],
        name=__name__,
        file=__file__,
        package=__package__,
        spec=__spec__ and __spec__.name,
        main=sys.modules["__main__"].__dict__ is globals(),
        optimize=sys.flags.optimize,
        dev=sys.flags.dev_mode,
        warnings=sys.warnoptions,
        xoptions=sorted(sys._xoptions),
        unbuffered=sys.stdout.write_through,
        utf8=sys.flags.utf8_mode,
    )
    print(json.dumps(portrait))
    # at exit, when a launcher that runs the script in its own process is __main__ again
    atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Config()))) is Config))
"""


def plain_and_launched(*arguments: Any, options: list[str] | None = None, **settings: Any) -> tuple[Any, Any]:
    """Runs ``python [options] arguments`` and ``python [options] -m ddpfix arguments``."""
    options = options or []
    return python(*options, *arguments, **settings), python(*options, "-m", "ddpfix", *arguments, **settings)


OWN_OPTION = ["-Xmy_own=1"] if hasattr(sys, "orig_argv") else []  # what the launcher cannot know of on Python 3.9


@pytest.mark.parametrize(
    "options",
    [[], ["-u"], ["-O", "-X", "dev", "-W", "ignore", "-W", "error::UserWarning"], ["-uBOO", "-Xutf8", *OWN_OPTION]],
    ids=" ".join,
)
def test_a_script_sees_what_it_sees_under_python(options: list[str], script: Any) -> None:
    target = script(PORTRAIT)
    plain, launched = plain_and_launched(target, "-m", "--status", "a b", "", options=options)
    assert json.loads(plain.stdout.splitlines()[0])["argv"][1:] == ["-m", "--status", "a b", ""]
    assert plain.stdout.splitlines()[1] == "True"
    assert (launched.stdout, launched.stderr) == (plain.stdout, plain.stderr)


def test_options_of_the_interpreter_written_together_with_the_module(script: Any) -> None:
    target = script(PORTRAIT)
    plain = python(*OWN_OPTION, "-u", "-O", target, "x")
    for launcher in (["-uOmddpfix"], ["-uOm", "ddpfix"], ["-uO", "-mddpfix"]):
        assert python(*OWN_OPTION, *launcher, target, "x").stdout == plain.stdout


@pytest.mark.skipif(not hasattr(sys, "orig_argv"), reason="Python 3.9 has but the other way")
def test_options_of_the_interpreter_as_python_3_9_finds_them(script: Any) -> None:
    target = script(PORTRAIT)
    plain = python("-u", "-O", "-W", "ignore", target, "x")
    code = "import sys; del sys.orig_argv; from ddpfix._cli import main; main(sys.argv[1:])"
    assert python("-u", "-O", "-W", "ignore", "-c", code, target, "x").stdout == plain.stdout


def test_a_module_sees_what_it_sees_under_python(script: Any) -> None:
    script("import sys; print('package', sys.argv[0])", "package/__init__.py")
    target = script(PORTRAIT, "package/train.py")
    script(PORTRAIT, "package/__main__.py")
    for name in ("package.train", "package"):
        plain, launched = plain_and_launched("-m", name, "x", "-m", cwd=target.parent.parent)
        assert plain.stdout.startswith("package -m\n")  # the package is imported once, by the program itself
        assert (launched.stdout, launched.stderr) == (plain.stdout, plain.stderr)


def test_a_program_on_standard_input_and_a_directory(script: Any, tmp_path: Path) -> None:
    plain, launched = plain_and_launched("-", "x", stdin="import sys; print(sys.argv)")
    assert launched.stdout == plain.stdout == "['-', 'x']\n"
    script("import sys; print(sys.argv[1:], sys.path[0])", "__main__.py")
    plain, launched = plain_and_launched(tmp_path / "scripts", "x")
    assert launched.stdout == plain.stdout != ""


@pytest.mark.parametrize(
    "end, code",
    [("import sys; sys.exit(7)", 7), ("raise SystemExit('sentence')", 1), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_how_the_program_ends(end: str, code: int, script: Any) -> None:
    plain, launched = plain_and_launched(script(end), code=code)
    assert launched.stderr == plain.stderr  # with the same traceback


def test_the_program_has_the_pid_of_the_launcher_and_gets_its_signals(script: Any) -> None:
    target = script(
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("terminated"), sys.exit(5)))
        print(os.getpid(), flush=True)
        time.sleep(60)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpfix", str(target)], env=environment(), stdout=subprocess.PIPE, text=True, cwd=target.parent
    )
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "terminated\n"
        assert process.wait(30) == 5
    finally:
        process.kill()
        process.wait()


def test_without_exec_the_exit_code_passes(script: Any) -> None:
    """As on Windows, where exec ends this process at once."""
    target = script(f"import sys; {HOW}; print(sys.argv[1:]); sys.exit(7)")
    code = "import sys; from ddpfix import _cli; _cli._can_exec = False; sys.exit(_cli.main(sys.argv[1:]))"
    result = python("-c", code, target, "x", code=7)
    assert result.stdout == "python -m ddpfix\n['x']\n"


def test_the_environment_of_the_program(script: Any, tmp_path: Path) -> None:
    target = script("import json, os; print(json.dumps(dict(os.environ)))")
    link = tmp_path / "link"
    link.symlink_to(BOOTSTRAP)
    for before, after in [
        (path("elsewhere"), path(BOOTSTRAP, "elsewhere")),
        (path("elsewhere", link, "more"), path(BOOTSTRAP, "elsewhere", "more")),
        (path(BOOTSTRAP, BOOTSTRAP), path(BOOTSTRAP)),
    ]:
        env = environment(PYTHONPATH=before, DDPFIX_LOOP_END="off")
        changed = {"PYTHONPATH": after, "DDPFIX_LAUNCHED_BY": "python -m ddpfix"}
        child = json.loads(python("-m", "ddpfix", target, env=env).stdout)
        assert {**child, "LC_CTYPE": ""} == {**env, **changed, "LC_CTYPE": ""}  # Python itself may set LC_CTYPE
    # an empty entry in PYTHONPATH would be the current directory
    child = json.loads(python("-m", "ddpfix", target, env=environment(PYTHONPATH=None), cwd=ROOT).stdout)
    assert child["PYTHONPATH"] == BOOTSTRAP


def test_a_launched_program_that_launches(script: Any) -> None:
    inner = script(f"import os; {HOW}; print(os.environ['PYTHONPATH'])", "inner.py")
    outer = script(f"import subprocess, sys; subprocess.run([sys.executable, '-m', 'ddpfix', {str(inner)!r}], check=True)")
    assert python("-m", "ddpfix", outer).stdout == f"python -m ddpfix\n{path(BOOTSTRAP)}\n"


@pytest.mark.parametrize("flag", ["-E", "-S", "-I"])
def test_flags_that_hide_the_bootstrap_are_refused_in_one_sentence(flag: str, script: Any) -> None:
    target = script("print('ran')")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from ddpfix._cli import main; sys.exit(main(sys.argv[1:]))"
    result = python(flag, "-c", code, target, code=2)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and flag in result.stderr and "import ddpfix" in result.stderr


@pytest.mark.parametrize(
    "arguments, names",
    [
        ([], ["nothing to run", "-m", "--path", "--status", "--version", "--help"]),
        (["--stat"], ["'--stat'", "-m", "--path", "--status", "--version", "--help"]),
        (["-c", "print('ran')"], ["'-c'", "-m", "--status"]),
        (["--status", "now"], ["--status takes no arguments", "'now'"]),
        (["-m"], ["-m needs the name of a module"]),
        (["missing.py"], ["'missing.py'", "-m"]),
        (["-m", "missing_module"], ["'missing_module'"]),
        (["-m", "json.missing"], ["'json.missing'"]),
        (["-m", "json.tool.missing"], ["'json.tool.missing'"]),
        (["-m", "json"], ["'json'", "__main__"]),
        (["-m", "script.py"], ["'script.py'"]),
        (["-m", ".relative"], ["'.relative'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_invalid_command_line_is_one_sentence_and_code_2(arguments: list[str], names: list[str], tmp_path: Path) -> None:
    result = python("-m", "ddpfix", *arguments, code=2, cwd=tmp_path)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("ddpfix: ")
    assert all(name in result.stderr for name in names), result.stderr


def test_a_package_that_finds_its_modules_only_when_imported(script: Any) -> None:
    script("import os; __path__.append(os.path.join(os.path.dirname(__file__), 'hidden'))", "package/__init__.py")
    target = script("print('ran')", "package/hidden/train.py")
    assert python("-m", "ddpfix", "-m", "package.train", cwd=target.parent.parent.parent).stdout == "ran\n"


def test_path_version_help() -> None:
    assert python("-m", "ddpfix", "--path").stdout.strip() == BOOTSTRAP
    import ddpfix

    assert python("-m", "ddpfix", "--version").stdout == f"ddpfix {ddpfix.__version__}\n"
    text = python("-m", "ddpfix", "--help").stdout
    assert all(word in text for word in ("--path", "--status", "--version", "-m", "torchrun", *(row[0] for row in _switches.TABLE)))


def test_the_path_in_a_job_script(script: Any) -> None:
    target = script(HOW)
    command = 'PYTHONPATH="$("$PYTHON" -m ddpfix --path):$PYTHONPATH" "$PYTHON" "$SCRIPT"'
    env = environment(PYTHON=sys.executable, SCRIPT=str(target))
    result = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, timeout=60)
    assert result.stdout == "sitecustomize\n"


# ---- status


def test_status_before_torch_imports_nothing_of_it() -> None:
    code = "import ddpfix, json, sys; print(json.dumps(ddpfix.status())); assert not {'torch', 'wrapt'} & set(sys.modules)"
    state = json.loads(python("-c", code, env=environment(DDPFIX_DISABLE="barrier", DDPFIX_LOOP_END="0")).stdout)
    assert state["torch"] is None and state["wrapt"] is None
    assert state["python"] == "%d.%d.%d" % sys.version_info[:3]
    assert state["switched_on_by"] == "import"
    defaults = {"DDPFIX_UNEVEN": "auto", "DDPFIX_PATIENCE": None, "DDPFIX_WATCH": 60.0}
    assert state["switches"] == {"DDPFIX": True, "DDPFIX_DISABLE": ["barrier"], "DDPFIX_LOOP_END": False, **defaults}
    assert state["patches"] == {"barrier": "disabled", "join": "pending"}


def status_lines(**changes: str | None) -> dict[str, str]:
    output = python("-m", "ddpfix", "--status", env=environment(**changes)).stdout
    return dict(line.split(": ", 1) for line in output.splitlines())


def test_status_of_a_broken_installation(tmp_path: Path) -> None:
    write(tmp_path / "torch.py", "raise OSError('libcudart.so.12: cannot open\\nshared object file')")
    lines = status_lines(PYTHONPATH=path(tmp_path), DDPFIX_DISABEL="join")
    assert lines["torch"] == "cannot be imported (OSError: libcudart.so.12: cannot open shared object file)"
    assert lines["patch join"] == "pending"
    assert lines["DDPFIX_DISABEL"] == "unknown, ignored"
    assert lines["switched on by"] == "python -m ddpfix"


def test_status_for_a_bug_report() -> None:
    import torch
    import wrapt

    lines = status_lines(PYTHONPATH=path(BOOTSTRAP), DDPFIX_DISABLE="barrier")
    assert lines["ddpfix"].endswith(str(ROOT / "ddpfix"))
    assert sys.executable in lines["python"]
    assert (lines["torch"], lines["wrapt"]) == (torch.__version__, wrapt.__version__)
    assert lines["switched on by"] == "sitecustomize"
    assert lines["cuda"] == str(torch.version.cuda)
    assert (lines["DDPFIX"], lines["DDPFIX_DISABLE"], lines["DDPFIX_LOOP_END"]) == ("1", "barrier", "1")
    assert (lines["patch barrier"], lines["patch join"]) == ("disabled", "applied")


# ---- with the real torch

RANK = f"""
    import os, sys, time
    {HOW}
    sys.stdout.write("unbuffered %s arguments %s\\n" % (sys.stdout.write_through, sys.argv[1:]))
    here = os.path.dirname(os.path.abspath(__file__))
    if os.environ["RANK"] == "0":
        import signal
        def terminated(*_):
            open(os.path.join(here, "terminated"), "w").close()
            sys.exit(1)
        signal.signal(signal.SIGTERM, terminated)
        open(os.path.join(here, "ready"), "w").close()
        time.sleep(60)
    while not os.path.exists(os.path.join(here, "ready")):
        time.sleep(0.01)
    sys.exit(3)
"""


def test_torchrun_passes_arguments_signals_and_exit_codes(script: Any) -> None:
    target = script(RANK)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = python(*torchrun, "-m", "ddpfix", target, "--lr", "1", code=1)
    assert result.stdout.splitlines().count("python -m ddpfix") == 2
    assert result.stdout.splitlines().count("unbuffered True arguments ['--lr', '1']") == 2
    assert (target.parent / "terminated").exists()
    assert "exitcode  : 3" in result.stderr


def test_torchrun_with_the_bootstrap_and_a_launched_torchrun(script: Any) -> None:
    target = script(HOW)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = python(*torchrun, target, env=environment(PYTHONPATH=path(BOOTSTRAP), DDPFIX_DISABLE="barrier,join"))
    assert result.stdout.split("\n") == ["sitecustomize", "sitecustomize", ""]
    result = python("-m", "ddpfix", *torchrun, target, env=environment(DDPFIX_DISABLE="barrier,join"))
    assert result.stdout.split("\n") == ["python -m ddpfix", "python -m ddpfix", ""]


def test_patches_are_applied_in_spawned_ranks_and_in_workers(script: Any) -> None:
    """mp.spawn and a DataLoader with a spawned worker, in a script that knows nothing of ddpfix."""
    target = script(
        """
        import sys
        import torch
        import torch.multiprocessing as mp
        from torch.utils.data import DataLoader

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 1

            def __getitem__(self, index):
                return how("worker")

        def how(where):
            import ddpfix
            return f"{where} {ddpfix._switched_on_by}: {ddpfix.status()['patches']['join']}"

        def rank(index, path):
            with open(path, "w") as file:
                file.write(how("rank"))

        if __name__ == "__main__":
            print(how("main"))
            print(*next(iter(DataLoader(Data(), num_workers=1, multiprocessing_context="spawn"))))
            mp.spawn(rank, (sys.argv[1],), nprocs=1)
            print(open(sys.argv[1]).read())
        """
    )
    result = python("-m", "ddpfix", target, target.parent / "answer", env=environment(DDPFIX_DISABLE="barrier"))
    assert result.stdout.splitlines() == [f"{where} python -m ddpfix: applied" for where in ("main", "worker", "rank")]


def test_the_whole_of_it_takes_no_time() -> None:
    """Not a measurement: a guard against a wait that crept in (a sleep, a look-up in the network)."""
    start = time.monotonic()
    python("-c", "import ddpfix", timeout=30)
    assert time.monotonic() - start < 10
