"""Calls back when a module has been imported, whoever imports it and in whichever thread.

A meta path finder of our own, because ``wrapt.register_post_import_hook`` would cost each Python process the import of wrapt (0.2 s
since wrapt 2.2), and fires at once for a module that is only half imported. Only modules that every interpreter has loaded at start
are imported here.
"""

from __future__ import annotations

import _thread
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_lock = _thread.allocate_lock()
_waiting: dict[str, list[Callable[[], object]]] = {}
_asking: set[tuple[int, str]] = set()  # (thread, module name) for which our finder is asking the others


def when_imported(module_name: str, callback: Callable[[], object]) -> None:
    """Calls ``callback()`` once, as soon as the module has been imported.

    That is at once if it is imported already; at the end of its execution, in the importing thread, if it is not; and from a thread
    that waits for the import to end if the import has begun before this call. An import that fails is not an arrival. An exception
    of the callback is logged on the logger ``ddpfix`` and goes no further: in ``import torch`` it would make that import fail.

    Arguments:
        module_name (str): the full name of the module.
        callback (Callable): called without arguments.
    """
    # Register first and look second: the other way round, an import that begins in another thread in between would be missed.
    with _lock:
        _waiting.setdefault(module_name, []).append(callback)
    if _finder not in sys.meta_path:
        # Never taken off again: importlib iterates over the live list, so that shortening it makes an import in another thread skip
        # a finder. With nobody waiting it costs a dictionary look-up per import.
        sys.meta_path.insert(0, _finder)
    if is_imported(module_name):
        _arrived(module_name)
    elif module_name in sys.modules:
        import threading

        threading.Thread(target=_wait_for, args=(module_name,), name="ddpfix-" + module_name, daemon=True).start()


def is_imported(module_name: str) -> bool:
    """Returns whether the module is imported to its end; a module that is being imported is in ``sys.modules`` as well."""
    module = sys.modules.get(module_name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _wait_for(module_name: str) -> None:
    try:
        __import__(module_name)  # waits on the import lock of the module until the thread that imports it is done
    except Exception:
        return  # that thread has got the error as well; the next attempt to import the module goes through the finder
    _arrived(module_name)


def _arrived(module_name: str) -> None:
    with _lock:
        callbacks = _waiting.pop(module_name, [])
    for callback in callbacks:
        try:
            callback()
        except Exception:
            import logging

            logging.getLogger("ddpfix").warning(
                "ddpfix could not act on the import of %s; the script runs as without ddpfix.", module_name, exc_info=True
            )


class _Finder:
    """Finds nothing itself: lets the other finders find a module that is waited for, and has its loader report the end."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Called for probes (importlib.util.find_spec) as well as for imports, so nothing may be used up here.
        asking = (_thread.get_ident(), fullname)
        if fullname not in _waiting or asking in _asking:
            return None
        _asking.add(asking)
        try:
            for finder in list(sys.meta_path):
                find_spec = getattr(finder, "find_spec", None)
                if finder is self or find_spec is None:
                    continue
                spec: ModuleSpec | None = find_spec(fullname, path, target)
                if spec is not None:
                    _report_end(spec, fullname)
                    return spec
        finally:
            _asking.discard(asking)
        return None


def _report_end(spec: ModuleSpec, module_name: str) -> None:
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None or isinstance(loader, type):
        return  # a namespace package, or built into the interpreter (there the loader is a class that all such modules share)

    def exec_module(module: ModuleType) -> None:
        try:
            del loader.exec_module  # type: ignore[union-attr]
        except AttributeError:
            pass
        execute(module)
        _arrived(module_name)

    # On the instance and not by a loader of our own, so that the module keeps its true __spec__.loader: pkgutil, importlib.resources
    # and inspect ask it for data, and others test its type.
    try:
        loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
    except AttributeError:
        pass


_finder = _Finder()
