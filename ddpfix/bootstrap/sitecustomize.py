"""Switches ddpfix on in every Python process that has this directory on ``PYTHONPATH``, then runs the sitecustomize that is hidden
by this one.

``PYTHONPATH`` reaches every interpreter, also ones that are too old for ddpfix or do not have it. So this file keeps to syntax that
they all parse, says nothing where ddpfix cannot be imported, and is no place for anything else.
"""

import os
import sys


def _switch_on():
    if sys.version_info < (3, 9):
        return
    first = "ddpfix" not in sys.modules
    try:
        import ddpfix
    except ImportError:
        # Not installed here. `python -m ddpfix` in a checkout finds ddpfix by the current directory, which the interpreter that it
        # starts does not search. The checkout goes not on sys.path, where it could hide other modules.
        import importlib.machinery
        import importlib.util

        parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        spec = importlib.machinery.PathFinder.find_spec("ddpfix", [parent])
        if spec is None or importlib.util.find_spec("wrapt") is None:
            return
        ddpfix = sys.modules["ddpfix"] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(ddpfix)
        except BaseException:
            sys.modules.pop("ddpfix", None)
            raise
    if first and ddpfix._switched_on_by == "import":
        ddpfix._switched_on_by = os.environ.get("DDPFIX_LAUNCHED_BY") or "sitecustomize"


def _hidden_sitecustomize():
    """Returns the spec of the sitecustomize that would have run without this directory, or None."""
    # The one of importlib.machinery, which is not imported for it: that takes longer than all the rest here.
    finders = [finder for finder in sys.meta_path if getattr(finder, "__name__", "") == "PathFinder"]
    if not finders:
        return None  # Python 2
    # Compared as real paths, and remembered on sys, because the same directory may be listed twice by two names, and two
    # installations of ddpfix may be listed: each would find the other for ever.
    if not hasattr(sys, "_ddpfix_bootstraps"):
        sys._ddpfix_bootstraps = set()
    sys._ddpfix_bootstraps.add(os.path.realpath(os.path.dirname(os.path.abspath(__file__))))
    others = [path for path in sys.path if os.path.realpath(path or os.curdir) not in sys._ddpfix_bootstraps]
    return finders[0].find_spec("sitecustomize", others)


def _run_hidden_sitecustomize():
    spec = _hidden_sitecustomize()
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    own = sys.modules.get("sitecustomize")
    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules["sitecustomize"] = own
        raise


try:
    _switch_on()
except SystemExit as error:
    # An invalid switch. Leaving `site` by an exception would end with a page of interpreter state and exit code 1.
    sys.stderr.flush()
    os._exit(error.code)
except Exception:
    pass  # this process may have nothing to do with torch; `python -m ddpfix --status` shows what is wrong

# Last and unprotected: it can neither stop ddpfix, nor does ddpfix hide its errors.
if __name__ == "sitecustomize":
    _run_hidden_sitecustomize()
