"""Lets unmodified ``DistributedDataParallel`` scripts finish when their ranks have different numbers of batches, and lets barriers
meet on the right GPU.

Importing this package switches it on; there is nothing to call. In order of preference::

    import ddpfix                                    # at the top of the script, outside of any ``if``
    python -m ddpfix train.py                        # or: torchrun -m ddpfix train.py
    PYTHONPATH="$(python -m ddpfix --path)" ...      # every Python process that is started with it

``DDPFIX=0`` in the environment switches it off. The import is cheap: torch is waited for, not imported.
"""

from __future__ import annotations

import sys

from ddpfix import _arrival, _switches

__version__ = "0.1.0"

__all__ = ["patch", "unpatch", "status", "CollectiveMismatchError", "__version__"]

# Any module of this package imports this file first, so the switch must be read before anything else happens.
try:
    _switches.current()
except _switches.SwitchError as _error:
    # While `python -m` looks for the module, argv[0] is "-m". These three only answer a question, and a --path that came out empty
    # in PYTHONPATH="$(...)" would let the job run without ddpfix; the job's own processes will refuse the switch.
    if sys.argv[:1] == ["-m"] and sys.argv[1:] in (["--path"], ["--help"], ["--version"]):
        _switches.turn_off()
    else:
        print(f"ddpfix: {_error}", file=sys.stderr)
        raise SystemExit(2) from None

# "import", or what the bootstrap writes over it
_switched_on_by = "import" if _switches.current().enabled else "off"
_torch_was_first = "torch" in sys.modules


def patch() -> None:
    """Applies all patches.

    Importing ddpfix has done that already, so this is needed only after :func:`unpatch`. Patches that are applied already are left
    alone. If torch is not imported yet, they are applied when it is. The environment goes first: nothing is applied with
    ``DDPFIX=0``, and no patch that ``DDPFIX_DISABLE`` names.

    A patch that cannot be applied is skipped with one warning on the logger ``ddpfix``, and :func:`status` tells why; the script then
    runs as without that patch.

    Example::

        >>> ddpfix.unpatch()
        >>> ddpfix.patch()
    """
    from ddpfix import _patches

    _patches.patch()


def unpatch() -> None:
    """Takes all patches off; every attribute of torch is again the very object that it was.

    Names that other modules have imported from torch meanwhile are set back as well. Where somebody else has wrapped an attribute on
    top of ddpfix, that attribute is left as it is, with a warning on the logger ``ddpfix``, and :func:`status` says ``replaced``.
    If torch is not imported yet, nothing will be applied when it is.

    Call it while no training step is under way, and on all ranks alike.

    Example::

        >>> ddpfix.unpatch()
        >>> ddpfix.status()["patches"]
        {'barrier': 'disabled', 'join': 'disabled'}
    """
    from ddpfix import _patches

    _patches.unpatch()


def status() -> dict[str, object]:
    """Tells what ddpfix is doing in this process, in values that :mod:`json` can write.

    Returns:
        dict: ``ddpfix``, ``python``, ``torch`` and ``wrapt``: versions (``None``: not imported yet); ``switched_on_by``: ``"import"``,
        ``"sitecustomize"``, ``"python -m ddpfix"`` or ``"off"``; ``switches``: the environment as read; ``patches``: for each patch
        ``"applied"``, ``"pending"`` (torch is not imported yet), ``"skipped: <reason>"``, ``"disabled"`` or ``"replaced"`` (somebody
        else has put something in its place); and, where a patch has more to tell, ``"<patch>_details"``.

    Example::

        >>> ddpfix.status()["patches"]["join"]
        'applied'
    """
    from ddpfix import _patches

    return _patches.status()


def __getattr__(name: str) -> object:
    # Not imported above: it would bring in the typing module, in every process.
    if name == "CollectiveMismatchError":
        from ddpfix._pairing import CollectiveMismatchError

        return CollectiveMismatchError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _apply_at_arrival() -> None:
    from ddpfix import _patches

    _patches.torch_arrived(late=_torch_was_first)


if _switches.current().enabled:
    _arrival.when_imported("torch", _apply_at_arrival)
