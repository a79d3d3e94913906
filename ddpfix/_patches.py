"""The registry of patches: applies them, takes them off, and tells how they stand. The only user of wrapt.

wrapt *places*; what is placed is the plain closure that a patch makes. A ``wrapt.FunctionWrapper`` in its stead would be dropped in
silence by ``torch.compile`` and ``torch.jit.script``, and could be neither pickled nor copied.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import platform
import sys
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

from ddpfix import _arrival, _switches

__all__ = ["Places", "Unavailable"]

_log = logging.getLogger("ddpfix")

# (name, module); a later patch wraps what an earlier one has placed, and is taken off before it.
PATCHES = (
    ("barrier", "ddpfix._barrier"),
    ("join", "ddpfix._join"),
)


class Unavailable(Exception):
    """A name of torch that a patch needs is missing or has changed; the text is the reason, to be read after "skipped: "."""


class Places:
    """What one patch has placed, handed to its ``install()``.

    If ``install()`` raises, everything placed through this object is taken off again. A closure that was placed may be called long
    after it was taken off, by whoever keeps a reference to it: it must then do what the original does.

    Arguments:
        late (bool): torch was imported to its end before, so that other modules may have imported names from it.
    """

    def __init__(self, late: bool = False) -> None:
        self.late = late
        self._placed: list[_Place] = []
        self._to_rebind: list[_Place] = []

    def wrap(
        self,
        module: str,
        attribute: str,
        factory: Callable[[Any], Any],
        *,
        also: Sequence[str] = (),
        rebind: bool = False,
    ) -> Any:
        """Places ``factory(original)`` at an attribute of a module.

        Arguments:
            module (str): full name of the module.
            attribute (str): name in the module; ``"Class.method"`` for a method. A method that the class inherits is placed on the
                class itself, and the base class stays as it is.
            factory (Callable): gets the object that stands there and returns the plain function to place, made with
                ``functools.wraps``.
            also (Sequence[str], optional): further modules where the same object stands under the same name. Where another object
                stands, or none, nothing is placed.
            rebind (bool, optional): if torch was imported before ddpfix, let globals of other modules that hold the original
                under any name hold the closure; one warning names other holders. Default: ``False``.

        Returns:
            The closure.

        Raises:
            Unavailable: the module or the attribute does not exist.
        """
        owner, name, original = _resolve(module, attribute)
        # wrapt asks vars() too; a slot that did not exist is deleted when the closure is taken off
        created = name not in vars(owner)
        closure = _wrapt().wrap_object(owner, name, factory)
        place = _Place(owner, name, f"{module}.{attribute}", original, closure, created)
        self._placed.append(place)
        for other in also:
            try:
                other_owner, other_name, there = _resolve(other, attribute)
            except Unavailable:
                continue
            if there is original:
                other_created = other_name not in vars(other_owner)
                _wrapt().wrap_object(other_owner, other_name, lambda _original: closure)
                where = f"{other}.{attribute}"
                self._placed.append(_Place(other_owner, other_name, where, original, closure, other_created))
        if rebind:
            self._to_rebind.append(place)
        return closure

    def rebind(self) -> None:
        """Sees to what other modules imported before; called once after ``install()``, for a pass over all modules takes its time."""
        if self.late and self._to_rebind:
            for where in _rebind([(place.original, place.closure) for place in self._to_rebind]):
                _log.debug("%s held an original of torch and now holds the patched one", where)
            taken = _other_holders(self._to_rebind)
            if taken:
                holders = list(dict.fromkeys(holder for _, holder in taken))
                names = [place.where for place in self._to_rebind if any(place is held for held, _ in taken)]
                _warn_at_import(
                    f"{', '.join(names)}: taken by {', '.join(holders[:5])}{' and others' if len(holders) > 5 else ''} before ddpfix "
                    "was imported, and not patched there; write `import ddpfix` at the top of the script."
                )
        self._to_rebind = []

    def take_off(self) -> list[str]:
        """Takes everything off, last placed first.

        Returns:
            list of str: the places that had to be left because somebody else stands there. They stay recorded.
        """
        left = [place for place in reversed(self._placed) if not place.take_off()]
        _rebind([(place.closure, place.original) for place in self._placed if place not in left])
        self._placed = left[::-1]
        self._to_rebind = []
        return [place.where for place in left]

    def replaced(self) -> list[str]:
        """Returns the places where the closure is no longer to be found, neither itself nor under other wrappers."""
        return [place.where for place in self._placed if not place.in_effect()]


class _Place:
    __slots__ = ("owner", "name", "where", "original", "closure", "created")

    def __init__(self, owner: Any, name: str, where: str, original: Any, closure: Any, created: bool) -> None:
        self.owner = owner
        self.name = name
        self.where = where
        self.original = original
        self.closure = closure
        self.created = created

    def _current(self) -> Any:
        return vars(self.owner).get(self.name)

    def take_off(self) -> bool:
        """Returns whether the original is back; if not, somebody else stands there and nothing was touched."""
        current = self._current()
        if current is self.closure:
            # By our own record: unwrap_object() would put back whatever closure.__wrapped__ says.
            if self.created:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)
            return True
        if current is self.original or (self.created and current is None):
            return True
        try:
            # Under a wrapt wrapper of somebody else the closure can be spliced out; anything else on top refuses.
            _wrapt().unwrap_object(self.owner, self.name, self.closure)
        except Exception as error:
            _log.debug("%s is left as it is: %s", self.where, error)
            return False
        return True

    def in_effect(self) -> bool:
        try:
            return bool(_wrapt().is_wrapped_by(self._current(), self.closure))
        except Exception:  # a foreign wrapper with a broken or endless __wrapped__ chain
            return False


class _Patch:
    """How one patch stands."""

    def __init__(self, name: str, module_name: str) -> None:
        self.name = name
        self.module_name = module_name
        self.module: types.ModuleType | None = None
        self.places: Places | None = None  # while applied
        self.remains: list[Places] = []  # what could not be taken off
        self.later: dict[str, Places] = {}  # module name -> what LATER has placed there
        self.awaited: set[str] = set()  # module names of LATER that have not arrived yet
        self.reason = ""  # why it was skipped

    def is_switched_off(self) -> bool:
        switches = _switches.current()
        return not switches.enabled or self.name in switches.disabled

    def state(self) -> str:
        if self.is_switched_off():
            return "disabled"
        if self.remains:
            return "replaced"
        if self.places is not None:
            everything = [self.places, *self.later.values()]
            return "replaced" if any(places.replaced() for places in everything) else "applied"
        if not _wanted:
            return "disabled"
        return f"skipped: {self.reason}" if self.reason else "pending"

    def apply(self, late: bool) -> None:
        if self.places is not None or self.remains or self.is_switched_off():
            return
        self.reason = ""
        places = Places(late)
        try:
            module = self.module = importlib.import_module(self.module_name)
            _wrapt()
            module.install(places)
            places.rebind()
        except Exception as error:
            self.reason = _one_line(error)
            self._keep(places.take_off(), places)
            _log.warning(
                "the patch %s is skipped: %s; the script runs as without it (torch %s)",
                self.name,
                self.reason,
                _version("torch"),
                # what a patch foresees is told by its text; anything else is a fault that wants its traceback
                exc_info=None if isinstance(error, (Unavailable, ImportError)) else error,
            )
            return
        self.places = places
        _log.info("the patch %s is applied (torch %s)", self.name, _version("torch"))
        for other in getattr(module, "LATER", {}):
            if other not in self.awaited:
                self.awaited.add(other)
                _arrival.when_imported(other, lambda other=other: self._apply_later(other))  # type: ignore[misc]

    def _apply_later(self, other: str) -> None:
        with _lock:
            self.awaited.discard(other)
            if self.places is None or other in self.later:
                return
            places = Places(late=True)
            try:
                cast(Any, self.module).LATER[other](places)
                places.rebind()
            except Exception as error:
                self._keep(places.take_off(), places)
                _log.warning(
                    "the patch %s leaves %s alone: %s",
                    self.name,
                    other,
                    _one_line(error),
                    exc_info=None if isinstance(error, Unavailable) else error,
                )
                return
            self.later[other] = places

    def revert(self) -> None:
        if self.places is None:
            return
        for places in [*reversed(list(self.later.values())), self.places]:
            self._keep(places.take_off(), places)
        self.places = None
        self.later = {}
        try:
            cast(Any, self.module).uninstall()
        except Exception:
            _log.warning("the patch %s did not end cleanly", self.name, exc_info=True)
        else:
            _log.info("the patch %s is taken off", self.name)

    def _keep(self, left: list[str], places: Places) -> None:
        if left:
            self.remains.append(places)
            _log.warning(
                "the patch %s could not be taken off %s: somebody else has put something there", self.name, ", ".join(left)
            )

    def take_off_remains(self) -> None:
        """Tries again what could not be taken off; whoever stood on top may be gone."""
        before, self.remains = self.remains, []
        for places in before:
            self._keep(places.take_off(), places)


# Guards the patches and _wanted. It must not be held during an import of torch: the thread that imports torch holds torch's import
# lock and asks for this one at the end, so that whoever held this one and asked for torch would wait forever.
_lock = threading.RLock()
_patches = [_Patch(name, module_name) for name, module_name in PATCHES]
_wanted = True


def torch_arrived(late: bool) -> None:
    """Applies the patches, unless :func:`unpatch` was called meanwhile.

    Arguments:
        late (bool): torch was there before ddpfix was.
    """
    with _lock:
        if _wanted:
            for patch in reversed(_patches):
                patch.take_off_remains()
            for patch in _patches:
                patch.apply(late)


def patch() -> None:
    """See :func:`ddpfix.patch`."""
    global _wanted
    if not _switches.current().enabled:
        _log.info("nothing is patched: DDPFIX is off")
        return
    with _lock:
        _wanted = True
        # While torch is being imported, that import will call torch_arrived().
        if _arrival.is_imported("torch"):
            torch_arrived(late=True)


def unpatch() -> None:
    """See :func:`ddpfix.unpatch`."""
    global _wanted
    with _lock:
        _wanted = False
        for patch in reversed(_patches):
            patch.take_off_remains()
            patch.revert()


def status() -> dict[str, object]:
    """See :func:`ddpfix.status`."""
    import ddpfix

    with _lock:
        answer: dict[str, object] = {
            "ddpfix": ddpfix.__version__,
            "python": platform.python_version(),
            "torch": _version("torch"),
            "wrapt": _version("wrapt"),
            "switched_on_by": ddpfix._switched_on_by,
            "switches": _switches.current().as_dict(),
            "patches": {patch.name: patch.state() for patch in _patches},
        }
        for patch in _patches:
            details = getattr(patch.module, "status", None)
            if patch.places is not None and details is not None:
                answer[f"{patch.name}_details"] = details()
    return answer


def _resolve(module: str, attribute: str) -> tuple[Any, str, Any]:
    """Returns the object to write to, the name to write, and what stands there now."""
    try:
        target = sys.modules.get(module) or importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{module} cannot be imported ({error})") from error
    try:
        return cast("tuple[Any, str, Any]", _wrapt().resolve_path(target, attribute))
    except AttributeError as error:
        raise Unavailable(f"{module}.{attribute} does not exist") from error


def _wrapt() -> Any:
    """Imports wrapt, which is free once torch is there (they share what is slow in it), and not before.

    As ``Any``, because its stubs know of factories that return wrapt's own wrappers only.
    """
    try:
        wrapt: Any = importlib.import_module("wrapt")
    except ImportError as error:
        raise Unavailable(f"wrapt cannot be imported ({error})") from error
    if not hasattr(wrapt, "unwrap_object"):
        raise Unavailable(f"wrapt >= 2.4 is needed, found {_version('wrapt')}")
    return wrapt


def _rebind(pairs: list[tuple[Any, Any]]) -> list[str]:
    """Lets every module global that holds the first of a pair hold the second; returns where that was."""
    if not pairs:
        return []
    new = {id(old): replacement for old, replacement in pairs}
    found = []
    for module_name, module in list(sys.modules.items()):
        # our own modules keep originals on purpose
        if module_name.partition(".")[0] == "ddpfix" or not isinstance(module, types.ModuleType):
            continue
        # not vars(): that makes a module of importlib.util.LazyLoader load itself
        namespace = types.ModuleType.__getattribute__(module, "__dict__")
        for name, value in list(namespace.items()):
            if id(value) in new:
                namespace[name] = new[id(value)]
                found.append(f"{module_name}.{name}")
    return found


def _other_holders(places: list[_Place]) -> list[tuple[_Place, str]]:
    """Names what still refers to originals after their places and all module globals have been taken care of.

    Returns:
        list of tuple: a place, and words for a holder of its original.
    """
    originals = [place.original for place in places]
    ours = {id(originals)}
    ours.update(id(vars(module)) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "ddpfix")
    for place in places:
        ours.update((id(place.closure), id(getattr(place.closure, "__dict__", None))))
        ours.update(id(cell) for cell in getattr(place.closure, "__closure__", None) or ())
    found: list[tuple[_Place, str]] = []
    holders = gc.get_referrers(*originals)
    ours.add(id(holders))
    for holder in holders:
        if id(holder) in ours or isinstance(holder, types.FrameType) or type(holder).__module__.partition(".")[0] == "ddpfix":
            continue
        held = gc.get_referents(holder)
        name = _describe(holder, ours)
        if name is not None:
            found.extend((place, name) for place in places if any(object_ is place.original for object_ in held))
    return found


def _describe(holder: Any, ours: set[int]) -> str | None:
    """Returns words by which the user can find a holder, or ``None`` where it is none of the user's."""
    if not _is_named(holder) and not _owners(holder, ours):
        return None  # left over from a call, such as the arguments of get_referrers() itself on Python 3.13
    name = _name_of(holder, ours, 3) or f"a {type(holder).__name__}"
    return None if name.removeprefix("an object of ").partition(".")[0] in ("torch", "ddpfix") else name


def _is_named(holder: Any) -> bool:
    return isinstance(holder, (type, types.FunctionType, functools._lru_cache_wrapper))


def _owners(holder: Any, ours: set[int]) -> list[Any]:
    found = gc.get_referrers(holder)
    ours = ours | {id(found)}

    def is_real(owner: Any) -> bool:
        if id(owner) in ours or isinstance(owner, types.FrameType):
            return False
        # On Python 3.13 the arguments of get_referrers() are among its results: tuples of one that nobody else refers to.
        return not _is_single(owner) or any(not _is_single(each) and id(each) not in ours for each in gc.get_referrers(owner))

    return [owner for owner in found if is_real(owner)]


def _is_single(owner: Any) -> bool:
    return type(owner) is tuple and len(owner) == 1


def _name_of(holder: Any, ours: set[int], depth: int) -> str | None:
    """Names a collection by what it belongs to, through at most ``depth`` collections around it."""
    if _is_named(holder):
        return f"{holder.__module__}.{holder.__qualname__}"
    if depth == 0:
        return None
    owners = _owners(holder, ours)
    for owner in owners:
        if _is_named(owner):
            return _name_of(owner, ours, depth)  # a cell of a function, its defaults; a cache
        if isinstance(holder, dict) and getattr(owner, "__dict__", None) is holder:
            return f"an object of {type(owner).__module__}.{type(owner).__qualname__}"
        if isinstance(owner, dict) and isinstance(owner.get("__name__"), str) and owner["__name__"] in sys.modules:
            return ".".join([owner["__name__"], *[key for key, value in list(owner.items()) if value is holder][:1]])
    for owner in owners[:3]:
        if isinstance(owner, (dict, list, tuple, set, types.CellType)):
            name = _name_of(owner, ours, depth - 1)
            if name is not None:
                return name
    return None


def _warn_at_import(text: str) -> None:
    """Warns on one rank, and blames the line that imported ddpfix."""
    if os.environ.get("RANK", "0") != "0":
        return
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("ddpfix", "importlib") and "importlib._bootstrap" not in frame.f_code.co_filename:
            warnings.warn_explicit(
                text,
                RuntimeWarning,
                frame.f_code.co_filename,
                frame.f_lineno,
                module=module,
                registry=frame.f_globals.setdefault("__warningregistry__", {}),
            )
            return
        frame = frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _version(module_name: str) -> str | None:
    version = getattr(sys.modules.get(module_name), "__version__", None)
    return None if version is None else str(version)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, (Unavailable, ImportError)) else f"{type(error).__name__}: {text}"
