"""The registry of patches: on, off, on again; whole or not at all; and the real patches on the real torch."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import types
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
from interpreters import environment, path, python, write

from ddpfix._patches import Places, Unavailable

wrapt = pytest.importorskip("wrapt")


def plus(text: str) -> Callable[[Any], Any]:
    """A factory whose closure adds to what the original returns."""

    def factory(original: Any) -> Any:
        @functools.wraps(original)
        def closure(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) + text

        return closure

    return factory


@pytest.fixture
def target() -> Iterator[types.ModuleType]:
    """A module ``places_target`` with a function, a class and one that inherits, and ``places_alias`` that offers the same names."""
    module = types.ModuleType("places_target")
    source = """
def function(text=""):
    return "function" + text

class Base:
    def inherited(self):
        return "inherited"

class Class(Base):
    def method(self):
        return "method"

    @staticmethod
    def static():
        return "static"
"""
    exec(source, vars(module))
    alias, other = types.ModuleType("places_alias"), types.ModuleType("places_other")
    alias.function = module.function  # type: ignore[attr-defined]
    other.function = lambda: "another"  # type: ignore[attr-defined]
    for each in (module, alias, other):
        sys.modules[each.__name__] = each
    yield module
    for each in (module, alias, other):
        del sys.modules[each.__name__]


# ---- Places


def test_wrap_places_the_closure_itself(target: Any) -> None:
    original = target.function
    places = Places()
    closure = places.wrap("places_target", "function", plus("+"))
    assert target.function is closure and type(closure) is types.FunctionType and closure.__wrapped__ is original
    assert target.function() == "function+"
    assert places.replaced() == []
    assert places.take_off() == []
    assert target.function is original


def test_wrap_a_method_in_place_and_an_inherited_one_on_the_class_alone(target: Any) -> None:
    base, cls = dict(vars(target.Base)), dict(vars(target.Class))
    places = Places()
    places.wrap("places_target", "Class.method", plus("+"))
    places.wrap("places_target", "Class.inherited", plus("+"))
    assert (target.Class().method(), target.Class().inherited(), target.Base().inherited()) == ("method+", "inherited+", "inherited")
    assert places.take_off() == []
    assert dict(vars(target.Base)) == base and dict(vars(target.Class)) == cls  # no slot is left behind


def test_wrap_a_static_method(target: Any) -> None:
    before = vars(target.Class)["static"]

    def factory(original: Any) -> Any:
        return staticmethod(plus("+")(original.__func__))

    places = Places()
    places.wrap("places_target", "Class.static", factory)
    assert target.Class.static() == target.Class().static() == "static+"
    assert places.take_off() == []
    assert vars(target.Class)["static"] is before


def test_also_takes_the_same_object_only(target: Any) -> None:
    alias, other = sys.modules["places_alias"], sys.modules["places_other"]
    original, another = target.function, other.function
    places = Places()
    closure = places.wrap("places_target", "function", plus("+"), also=("places_alias", "places_other", "places_missing"))
    assert alias.function is closure and other.function is another
    assert places.take_off() == []
    assert alias.function is original and other.function is another


@pytest.mark.parametrize(
    "module, attribute", [("places_missing", "function"), ("places_target", "missing"), ("places_target", "Class.missing")]
)
def test_what_is_missing_is_unavailable(target: Any, module: str, attribute: str) -> None:
    with pytest.raises(Unavailable, match="places_missing cannot be imported|places_target.*missing does not exist"):
        Places().wrap(module, attribute, plus("+"))


@pytest.mark.parametrize("state, reason", [("missing", "wrapt cannot be imported"), ("old", "wrapt >= 2.4 is needed, found 1.17.3")])
def test_without_wrapt_everything_is_unavailable(target: Any, state: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("wrapt")
    old.__version__ = "1.17.3"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wrapt", None if state == "missing" else old)
    with pytest.raises(Unavailable, match=reason):
        Places().wrap("places_target", "function", plus("+"))


def holder(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module
    return module


@pytest.fixture
def user() -> Iterator[Callable[..., types.ModuleType]]:
    made: list[str] = []

    def make(name: str = "places_user", **names: Any) -> types.ModuleType:
        made.append(name)
        return holder(name, **names)

    yield make
    for name in made:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("late, rebind", [(True, True), (True, False), (False, True)])
def test_rebind_sets_globals_that_took_the_original_before(target: Any, user: Any, late: bool, rebind: bool) -> None:
    original = target.function
    module = user(taken=original, taken_twice=original, another=print)
    own = user("ddpfix.places_user", kept=original)
    places = Places(late)
    closure = places.wrap("places_target", "function", plus("+"), rebind=rebind)
    places.rebind()
    expected = closure if late and rebind else original
    assert module.taken is module.taken_twice is expected
    assert module.another is print and own.kept is original
    assert places.take_off() == []
    assert module.taken is module.taken_twice is original


def test_names_imported_while_patched_are_set_back(target: Any, user: Any) -> None:
    original = target.function
    places = Places()
    places.wrap("places_target", "function", plus("+"))
    module = user(renamed=target.function)
    assert places.take_off() == []
    assert module.renamed is original


def test_a_lazy_module_is_not_loaded_by_the_search(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "places_lazy.py", "import sys\nsys._places_lazy_was_loaded = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.find_spec("places_lazy")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "places_lazy", lazy)
    spec.loader.exec_module(lazy)
    places = Places(late=True)
    places.wrap("places_target", "function", plus("+"), rebind=True)
    places.rebind()
    places.take_off()
    assert not hasattr(sys, "_places_lazy_was_loaded")


def warned(target: Any, **names: Any) -> list[str]:
    gc.collect()
    places = Places(late=True)
    places.wrap("places_target", "function", plus("+"), rebind=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        places.rebind()
    places.take_off()
    assert all(warning.category is RuntimeWarning and warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_other_holders_are_named_in_one_warning(target: Any, user: Any) -> None:
    module = user()
    source = """
def default(callback=function): pass
def make(function):
    def closure(): return function
    return closure
closure = make(function)
table = {"call": [function]}
class Keeper: pass
keeper = Keeper()
keeper.callback = function
"""
    vars(module)["function"] = target.function
    exec(source, vars(module))
    messages = warned(target)
    assert len(messages) == 1
    for name in ("places_target.function", "places_user.default", "places_user.make.<locals>.closure", "places_user.table"):
        assert name in messages[0]
    assert "places_user.Keeper" in messages[0] or "places_user.keeper" in messages[0]
    assert "import ddpfix" in messages[0]


def test_nobody_is_warned_without_other_holders(target: Any, user: Any) -> None:
    user(taken=target.function)
    assert warned(target) == []


def test_torchs_own_holders_are_no_reason_to_warn(target: Any, user: Any) -> None:
    user("torch.places_user", table={"call": target.function}, __name__="torch.places_user")
    assert warned(target) == []


def test_one_rank_warns(target: Any, user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    user(table=[target.function])
    for rank, count in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert len(warned(target)) == count


def test_a_wrapt_wrapper_of_somebody_else_on_top_stays_and_ours_goes(target: Any) -> None:
    original = target.function
    places = Places()
    closure = places.wrap("places_target", "function", plus("+"))
    wrapt.wrap_function_wrapper("places_target", "function", lambda wrapped, _, args, kwargs: wrapped(*args, **kwargs) + "*")
    assert target.function() == "function+*"
    assert places.replaced() == []  # it is still in effect
    assert places.take_off() == []
    assert target.function() == "function*"
    assert target.function.__wrapped__ is original and closure() == "function+"


def test_a_plain_wrapper_of_somebody_else_on_top_stays_with_ours_under_it(target: Any) -> None:
    original = target.function
    places = Places()
    closure = places.wrap("places_target", "function", plus("+"), also=["places_alias"])
    theirs = target.function = plus("*")(closure)
    assert places.replaced() == []
    assert places.take_off() == ["places_target.function"]
    assert target.function is theirs and sys.modules["places_alias"].function is original
    target.function = closure  # they are gone
    assert places.take_off() == []
    assert target.function is original


def test_an_attribute_that_somebody_else_has_set_anew(target: Any) -> None:
    places = Places()
    places.wrap("places_target", "function", plus("+"))
    theirs = target.function = lambda: "theirs"
    assert places.replaced() == ["places_target.function"]
    assert places.take_off() == ["places_target.function"]
    assert target.function is theirs


# ---- the life of a patch, on a torch that takes no time to import

TORCH = """
    import sys, time
    __version__ = "2.99"
    def barrier(): return "barrier"
    class DDP:
        def forward(self): return "forward"
    stock = (barrier, DDP.__dict__["forward"])
    if hasattr(sys, "_during_torch"):
        sys._during_torch()
    end = True
"""

# what every script below begins with
LIFE = """
    import functools, json, logging, sys, threading, types

    records = []
    class Handler(logging.Handler):
        def emit(self, record):
            records.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("ddpfix")
    logger.addHandler(Handler())
    logger.propagate = False

    import ddpfix
    from ddpfix import _patches

    def warnings():
        return [text for level, text in records if level == "WARNING"]

    def states():
        return list(ddpfix.status()["patches"].values())

    def plus(text):
        def factory(original):
            @functools.wraps(original)
            def closure(*args):
                return original(*args) + text
            return closure
        return factory

    def add(name, install, uninstall=lambda: None, **more):
        module = types.ModuleType("life_" + name)
        module.install, module.uninstall = install, uninstall
        vars(module).update(more)
        sys.modules[module.__name__] = module
        _patches._patches.append(_patches._Patch(name, module.__name__))

    def is_stock():
        import torch
        return (torch.barrier, vars(torch.DDP)["forward"]) == torch.stock

    _patches._patches.clear()
"""

BOTH = """
    ended = []
    add("barrier", lambda places: places.wrap("torch", "barrier", plus("+B")), lambda: ended.append("barrier"))

    def install(places):
        places.wrap("torch", "barrier", plus("+J"))
        places.wrap("torch", "DDP.forward", plus("+J"))

    add("join", install, lambda: ended.append("join"))

    def is_patched():
        return (torch.barrier(), torch.DDP().forward()) == ("barrier+B+J", "forward+J")
"""


@pytest.fixture
def life(tmp_path: Path) -> Callable[..., None]:
    """Runs a script after LIFE, with a fake torch; it must print nothing and reach its end."""
    import textwrap

    write(tmp_path / "torch.py", TORCH)

    def run(*sources: str, **changes: str) -> None:
        source = "\n".join(textwrap.dedent(part) for part in (LIFE, *sources, "print('done')"))
        script = write(tmp_path / "life.py", source)
        result = python(script, env=environment(PYTHONPATH=path(tmp_path), **changes), timeout=60)
        assert (result.stdout, result.stderr) == ("done\n", "")

    return run


def test_patches_wait_for_torch_and_come_off_and_on(life: Any) -> None:
    life(
        BOTH,
        """
        assert states() == ["pending", "pending"]
        ddpfix.patch()
        assert states() == ["pending", "pending"] and "torch" not in sys.modules and "wrapt" not in sys.modules
        import torch
        assert states() == ["applied", "applied"] and is_patched()
        for _ in range(3):
            ddpfix.patch()  # idempotent
            assert is_patched()
            ddpfix.unpatch()
            assert is_stock() and states() == ["disabled", "disabled"] and ended == ["join", "barrier"]
            ddpfix.unpatch()
            assert is_stock() and ended == ["join", "barrier"]
            ended.clear()
            ddpfix.patch()
            assert is_patched() and states() == ["applied", "applied"]
        assert json.loads(json.dumps(ddpfix.status())) == ddpfix.status()
        assert warnings() == []
        """,
    )


def test_torch_before_ddpfix(life: Any) -> None:
    life(
        BOTH,
        """
        import torch
        sys.modules["life_user"] = user = types.ModuleType("life_user")
        ddpfix.unpatch()
        user.bar = torch.barrier
        _patches._patches.clear()
        add("barrier", lambda places: places.wrap("torch", "barrier", plus("+B"), rebind=True))
        ddpfix.patch()
        assert states() == ["applied"] and user.bar is torch.barrier and user.bar() == "barrier+B"
        ddpfix.unpatch()
        assert user.bar is torch.stock[0]
        """,
    )


def test_import_ddpfix_after_torch_patches_at_once(tmp_path: Path) -> None:
    write(tmp_path / "torch.py", TORCH)
    code = "import torch, ddpfix; print(*[state.split()[0] for state in ddpfix.status()['patches'].values()])"
    env = environment(PYTHONPATH=path(tmp_path))
    # the real patches find nothing in this torch, and say so before anybody asks
    result = python("-c", code, env=env)
    assert result.stdout == "skipped: skipped:\n"
    assert result.stderr.count("is skipped") == 2


def test_unpatch_before_torch_arrives(life: Any) -> None:
    life(
        BOTH,
        """
        ddpfix.unpatch()
        assert states() == ["disabled", "disabled"]
        import torch
        assert is_stock()
        ddpfix.patch()
        assert is_patched()
        """,
    )


def test_disabled_in_part(life: Any) -> None:
    life(
        BOTH,
        """
        import torch
        assert states() == ["applied", "disabled"]
        ddpfix.patch()
        assert (torch.barrier(), torch.DDP().forward()) == ("barrier+B", "forward")
        """,
        DDPFIX_DISABLE="join",
    )


@pytest.mark.parametrize(
    "failure, reason",
    [
        ("places.wrap('torch', 'renamed', plus('+'))", "torch.renamed does not exist"),
        ("places.wrap('torch.gone', 'barrier', plus('+'))", "torch.gone cannot be imported"),
        ("raise _patches.Unavailable('forward has another signature')", "forward has another signature"),
        ("import missing_module", "No module named 'missing_module'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_patch_that_fails_is_taken_off_whole_and_the_others_stay(life: Any, failure: str, reason: str) -> None:
    life(
        f"""
        def install(places):
            places.wrap("torch", "DDP.forward", plus("+"))
            places.wrap("torch", "barrier", plus("+"))
            {failure}

        add("barrier", install)
        add("join", lambda places: places.wrap("torch", "barrier", plus("+J")))
        import torch
        assert torch.end
        assert states()[0].startswith({'skipped: ' + reason!r}), states()
        assert states()[1] == "applied"
        assert torch.barrier() == "barrier+J" and vars(torch.DDP)["forward"] is torch.stock[1]
        assert len(warnings()) == 1 and {reason!r} in warnings()[0] and "barrier" in warnings()[0] and "2.99" in warnings()[0]
        ddpfix.unpatch()
        assert is_stock() and len(warnings()) == 1
        """
    )


def test_a_patch_whose_module_is_missing_is_skipped(life: Any) -> None:
    life(
        """
        _patches._patches.append(_patches._Patch("barrier", "ddpfix._missing"))
        import torch
        assert states() == ["skipped: No module named 'ddpfix._missing'"] and len(warnings()) == 1
        """
    )


def test_an_error_in_uninstall_does_not_stop_the_others(life: Any) -> None:
    life(
        """
        add("barrier", lambda places: places.wrap("torch", "barrier", plus("+B")))
        add("join", lambda places: places.wrap("torch", "barrier", plus("+J")), lambda: 1 / 0)
        import torch
        ddpfix.unpatch()
        assert is_stock() and len(warnings()) == 1
        """
    )


def test_somebody_elses_wrapper_is_left_and_reported(life: Any) -> None:
    life(
        BOTH,
        """
        import torch
        ours = torch.barrier
        theirs = torch.barrier = plus("+T")(ours)
        assert states() == ["applied", "applied"]
        ddpfix.unpatch()
        assert states() == ["replaced", "replaced"] and torch.barrier is theirs
        assert vars(torch.DDP)["forward"] is torch.stock[1]  # the rest is off
        assert len(warnings()) == 2 and all("torch.barrier" in text for text in warnings())
        ddpfix.patch()
        assert states() == ["replaced", "replaced"] and torch.barrier is theirs  # not a second time under or over it
        torch.barrier = ours  # they are gone
        ddpfix.patch()
        assert states() == ["applied", "applied"] and is_patched()
        torch.barrier = lambda: "theirs"
        assert states() == ["replaced", "replaced"]
        """,
    )


def test_the_status_of_a_patch_is_added(life: Any) -> None:
    life(
        """
        add("join", lambda places: None, status=lambda: {"votes": 3})
        assert "join_details" not in ddpfix.status()
        import torch
        assert ddpfix.status()["join_details"] == {"votes": 3}
        ddpfix.unpatch()
        assert "join_details" not in ddpfix.status()
        """
    )


LATER = """
    import os
    with open(os.path.join(os.path.dirname(__file__), "extra.py"), "w") as file:
        file.write("def load(): return 'load'\\nstock = load\\n")
    import importlib
    importlib.invalidate_caches()
    runs = []

    def later(places):
        runs.append("later")
        places.wrap("extra", "load", plus("+L"))
        if failing:
            raise _patches.Unavailable("load is not what it was")

    failing = False
    add("join", lambda places: places.wrap("torch", "barrier", plus("+J")), LATER={"extra": later})
"""


def test_later_follows_the_module_and_the_patch(life: Any) -> None:
    life(
        LATER,
        """
        import torch
        assert states() == ["applied"] and runs == []
        ddpfix.unpatch()
        ddpfix.patch()
        import extra
        assert extra.load() == "load+L" and runs == ["later"]
        ddpfix.unpatch()
        assert extra.load is extra.stock and is_stock()
        ddpfix.patch()
        assert extra.load() == "load+L" and runs == ["later", "later"]
        ddpfix.patch()
        assert extra.load() == "load+L"
        ddpfix.unpatch()
        assert extra.load is extra.stock
        """,
    )


def test_later_with_the_module_before_torch(life: Any) -> None:
    life(LATER, "import extra\nassert runs == []\nimport torch\nassert extra.load() == 'load+L'")


def test_later_is_not_run_while_the_patch_is_off(life: Any) -> None:
    life(
        LATER,
        """
        import torch
        ddpfix.unpatch()
        import extra
        assert runs == [] and extra.load is extra.stock
        ddpfix.patch()
        assert runs == ["later"] and extra.load() == "load+L"
        """,
    )


def test_a_failure_in_later_leaves_the_patch_applied(life: Any) -> None:
    life(
        LATER,
        """
        failing = True
        import torch, extra
        assert extra.load is extra.stock and states() == ["applied"] and torch.barrier() == "barrier+J"
        assert len(warnings()) == 1 and "load is not what it was" in warnings()[0] and "extra" in warnings()[0]
        """,
    )


# ---- threads


def test_eight_threads_import_torch(life: Any) -> None:
    life(
        BOTH,
        """
        start = threading.Barrier(8)
        seen = []

        def run():
            start.wait(30)
            import torch
            seen.append(torch.barrier() + torch.DDP().forward())

        import time
        sys._during_torch = lambda: time.sleep(0.1)
        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join(30)
        assert seen == ["barrier+B+J" + "forward+J"] * 8, seen  # none of them got torch before it was patched
        """,
    )


def test_eight_threads_patch_and_unpatch(life: Any) -> None:
    life(
        BOTH,
        """
        import torch
        ddpfix.unpatch()
        start = threading.Barrier(8)
        sys.setswitchinterval(1e-6)
        errors = []

        def run(*calls):
            try:
                start.wait(30)
                for call in calls:
                    call()
            except BaseException as error:
                errors.append(error)

        def together(*calls):
            threads = [threading.Thread(target=run, args=calls) for _ in range(8)]
            for thread in threads: thread.start()
            for thread in threads: thread.join(30)
            assert errors == []

        for _ in range(20):
            together(ddpfix.patch)
            assert is_patched()  # one layer each, not eight
            together(ddpfix.unpatch)
            assert is_stock()
        together(*[ddpfix.patch, ddpfix.status, ddpfix.unpatch] * 5)
        ddpfix.unpatch()
        assert is_stock() and warnings() == []
        """,
    )


def test_calls_during_the_import_of_torch_in_another_thread_do_not_wait_for_it(life: Any) -> None:
    life(
        BOTH,
        """
        half, go_on = threading.Event(), threading.Event()

        def during():
            half.set()
            assert go_on.wait(30)

        sys._during_torch = during
        importer = threading.Thread(target=__import__, args=("torch",))
        importer.start()
        assert half.wait(30)
        ddpfix.patch()
        assert states() == ["pending", "pending"]
        ddpfix.unpatch()
        ddpfix.patch()
        assert not hasattr(sys.modules["torch"], "end")
        go_on.set()
        importer.join(30)
        import torch
        assert is_patched()
        """,
    )


def test_the_lock_is_free_while_torch_is_imported_under_it(life: Any) -> None:
    """A patch whose module imports torch first: with the lock held around that, the importing thread would wait for ever."""
    life(
        BOTH,
        """
        half = threading.Event()

        def during():
            half.set()
            caller.join(30)  # were it to wait for this import, it would not end
            assert not caller.is_alive()

        def call():
            assert half.wait(30)
            ddpfix.unpatch()
            ddpfix.patch()
            ddpfix.status()

        sys._during_torch = during
        caller = threading.Thread(target=call)
        caller.start()
        import torch
        assert is_patched()
        """,
    )


def test_ddpfix_imported_in_the_middle_of_torch(tmp_path: Path) -> None:
    write(tmp_path / "torch.py", TORCH)
    code = """if True:
        import sys, threading, time
        def during():
            import ddpfix
            from ddpfix import _patches
            sys.patched = threading.Event()
            _patches._patches[:] = [_patches._Patch("barrier", "life")]
            class life:
                @staticmethod
                def install(places):
                    import torch
                    assert torch.end
                    sys.patched.set()
            sys.modules["life"] = life
            time.sleep(0.2)
            assert not sys.patched.is_set()
        sys._during_torch = during
        import torch
        assert sys.patched.wait(30)
        import ddpfix
        print(ddpfix.status()["patches"])
    """
    assert python("-c", code, env=environment(PYTHONPATH=path(tmp_path))).stdout == "{'barrier': 'applied'}\n"


# ---- the real patches on the real torch

REAL = """
    import json, pickle, sys, types
    import torch, torch.distributed as dist
    import torch.utils.data.dataloader, torch.optim.lr_scheduler, torch.distributed.algorithms.join, torch.amp.grad_scaler
    try:
        import torchdata.stateful_dataloader.stateful_dataloader
    except ImportError:
        pass
    sys.modules["user_of_torch"] = user = types.ModuleType("user_of_torch")
    user.meet, user.reduce = dist.barrier, dist.all_reduce

    def picture():
        '''Every attribute of every module and class of torch, and of what else a patch may touch.'''
        seen = {}
        for name, module in list(sys.modules.items()):
            if not isinstance(module, types.ModuleType):
                continue
            if name.partition(".")[0] not in ("torch", "torchdata", "sys", "builtins", "user_of_torch"):
                continue
            for key, value in list(types.ModuleType.__getattribute__(module, "__dict__").items()):
                if not key.startswith("__"):
                    seen[name, key] = value
                if isinstance(value, type) and value.__module__ == name:
                    for attribute, inner in list(vars(value).items()):
                        if attribute not in ("__dict__", "__weakref__", "_abc_impl"):
                            seen[name, key + "." + attribute] = inner
        return seen

    def differences(one, other):
        return sorted(".".join(key) for key in one.keys() | other.keys() if one.get(key) is not other.get(key))

    stock = picture()
    import ddpfix
    answer = dict(status=ddpfix.status())
    patched = picture()
    answer["touched"] = differences(stock, patched)
    answer["not plain"], answer["not pickled"] = [], []
    for patch in ddpfix._patches._patches:
        for places in [patch.places, *patch.later.values()] if patch.places else []:
            for place in places._placed:
                if type(place.closure) is not types.FunctionType:
                    answer["not plain"].append(place.where)
                if isinstance(place.owner, types.ModuleType):
                    function = vars(place.owner)[place.name]
                    if pickle.loads(pickle.dumps(function)) is not function:
                        answer["not pickled"].append(place.where)
    ddpfix.unpatch()
    answer["after unpatch"] = differences(stock, picture())
    ddpfix.patch()
    answer["touched again"] = differences(stock, picture())
    ddpfix.unpatch()
    answer["after all"] = differences(stock, picture())
    answer["status after all"] = ddpfix.status()["patches"]
    print(json.dumps(answer))
"""


def test_unpatch_restores_every_attribute_of_torch(tmp_path: Path) -> None:
    import json

    result = python(write(tmp_path / "real.py", REAL), timeout=120)
    answer = json.loads(result.stdout.splitlines()[-1])
    states = answer["status"]["patches"]
    assert states == {"barrier": "applied", "join": "applied"}
    expected = {"torch.distributed.distributed_c10d.barrier", "torch.distributed.barrier", "user_of_torch.meet"}
    expected |= {"torch.distributed.all_reduce", "user_of_torch.reduce"}
    assert expected <= set(answer["touched"])
    assert any(name.startswith("torch.nn.parallel.distributed.DistributedDataParallel.") for name in answer["touched"])
    # the class itself is never replaced
    assert not any(name.endswith(".DistributedDataParallel") for name in answer["touched"])
    assert answer["touched again"] == answer["touched"]
    assert answer["after unpatch"] == answer["after all"] == []
    assert answer["not plain"] == answer["not pickled"] == []
    assert answer["status after all"] == {"barrier": "disabled", "join": "disabled"}


def test_a_script_that_took_names_from_torch_before_ddpfix_is_patched_without_a_word(tmp_path: Path) -> None:
    """torch's own tables of functions are no reason to warn, either."""
    source = """
        import torch._dynamo.trace_rules
        torch._dynamo.trace_rules.get_torch_obj_rule_map()
        import torch.distributed as dist
        from torch.distributed import all_reduce, barrier
        import ddpfix
        assert all_reduce is dist.all_reduce and barrier is dist.barrier
        assert "ddpfix" in all_reduce.__code__.co_filename and "ddpfix" in barrier.__code__.co_filename
        ddpfix.unpatch()
        ddpfix.patch()
        assert all_reduce is dist.all_reduce and barrier is dist.barrier
    """
    assert python(write(tmp_path / "taken.py", source), timeout=120).stderr == ""


def test_patches_applied_on_arrival_are_taken_off(tmp_path: Path) -> None:
    """The other order: nothing of ddpfix is left anywhere in torch."""
    source = """
        import sys, types
        import ddpfix
        import torch, torch.distributed
        def left():
            found = []
            for name, module in list(sys.modules.items()):
                if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
                    for key, value in list(types.ModuleType.__getattribute__(module, "__dict__").items()):
                        values = [value, *vars(value).values()] if isinstance(value, type) and value.__module__ == name else [value]
                        functions = [each for each in values if type(each) is types.FunctionType]
                        if any("ddpfix" in each.__code__.co_filename.split("/")[-2:] for each in functions):
                            found.append(name + "." + key)
            return found
        assert ddpfix.status()["patches"]["join"] == "applied"
        assert "torch.distributed.barrier" in left(), left()
        ddpfix.unpatch()
        print(left())
    """
    assert python(write(tmp_path / "arrival.py", source), timeout=120).stdout == "[]\n"
