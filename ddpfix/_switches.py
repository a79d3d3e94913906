"""The environment variables of ddpfix: the one table of them, and how they are read.

Nothing but the standard library's smallest modules may be imported here: this module runs in every process that has the bootstrap
directory on ``PYTHONPATH``, also in those that never import torch.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # the typing module alone would cost a third of the 10 ms that `import ddpfix` may cost
if TYPE_CHECKING:
    from collections.abc import Mapping

ON = ("1", "on", "true")
OFF = ("0", "off", "false")
PATCH_NAMES = ("barrier", "join")
UNEVEN = ("auto", "join", "stop")

# name, valid values, default, meaning. The README shows this table; a test compares the two.
TABLE = (
    ("DDPFIX", "1, on, true, 0, off, false", "1", "whether ddpfix does anything at all"),
    ("DDPFIX_DISABLE", "a comma separated list of barrier, join", "", "patches that are left out"),
    (
        "DDPFIX_LOOP_END",
        "1, on, true, 0, off, false",
        "1",
        "whether the end of a plain `for` over a training DataLoader is a meeting point of the ranks",
    ),
    (
        "DDPFIX_UNEVEN",
        "auto, join, stop",
        "auto",
        "what happens when a rank runs out of batches: it shadows the others (join), or all end that loop together (stop); auto is "
        "stop for models that communicate in their forward or backward, which cannot be shadowed, else join",
    ),
    (
        "DDPFIX_PATIENCE",
        "a number of seconds",
        "",
        "how long a rank that has ended its part waits for each step of the others before it leaves without them; if empty, half of "
        "the process group's timeout",
    ),
    (
        "DDPFIX_WATCH",
        "a number of seconds, 0 for never",
        "60",
        "how long a rank waits for others before it says, at WARNING, where each of them stands",
    ),
)

# Not a switch: `python -m ddpfix` sets it for the interpreter it starts, so that status() of that interpreter and of its children
# can tell how ddpfix came to them.
LAUNCHED_BY = "DDPFIX_LAUNCHED_BY"


class SwitchError(ValueError):
    """An environment variable of ddpfix has a value that means nothing; the text is one sentence with the valid values."""


class Switches:
    """The switches as read from one environment.

    Arguments:
        enabled (bool): ``DDPFIX``.
        disabled (tuple of str): the patches named by ``DDPFIX_DISABLE``.
        loop_end (bool): ``DDPFIX_LOOP_END``.
        uneven (str): ``DDPFIX_UNEVEN``.
        patience (float or None): ``DDPFIX_PATIENCE``, in seconds.
        watch (float): ``DDPFIX_WATCH``, in seconds.
    """

    __slots__ = ("disabled", "enabled", "loop_end", "patience", "uneven", "watch")

    def __init__(
        self,
        enabled: bool = True,
        disabled: tuple[str, ...] = (),
        loop_end: bool = True,
        uneven: str = "auto",
        patience: float | None = None,
        watch: float = 60.0,
    ) -> None:
        self.enabled = enabled
        self.disabled = disabled
        self.loop_end = loop_end
        self.uneven = uneven
        self.patience = patience
        self.watch = watch

    def as_dict(self) -> dict[str, object]:
        """Returns the switches under their environment names, JSON-able."""
        return {
            "DDPFIX": self.enabled,
            "DDPFIX_DISABLE": list(self.disabled),
            "DDPFIX_LOOP_END": self.loop_end,
            "DDPFIX_UNEVEN": self.uneven,
            "DDPFIX_PATIENCE": self.patience,
            "DDPFIX_WATCH": self.watch,
        }


def read(environ: Mapping[str, str]) -> Switches:
    """Reads the switches from an environment.

    An empty value counts as unset, because ``DDPFIX= command`` is how shells spell that. Case and surrounding blanks do not matter.

    Arguments:
        environ (Mapping[str, str]): usually ``os.environ``.

    Returns:
        Switches

    Raises:
        SwitchError: a value is none of the valid ones.
    """
    disabled = []
    for word in environ.get("DDPFIX_DISABLE", "").split(","):
        name = word.strip().lower()
        if name and name not in PATCH_NAMES:
            raise _invalid("DDPFIX_DISABLE", environ["DDPFIX_DISABLE"])
        if name and name not in disabled:
            disabled.append(name)
    return Switches(
        enabled=_on_or_off("DDPFIX", environ),
        disabled=tuple(disabled),
        loop_end=_on_or_off("DDPFIX_LOOP_END", environ),
        uneven=_one_of(UNEVEN, "DDPFIX_UNEVEN", environ),
        patience=_seconds("DDPFIX_PATIENCE", environ),
        watch=_seconds("DDPFIX_WATCH", environ) or 0.0,
    )


def current() -> Switches:
    """Returns the switches as they were when ddpfix was imported; later changes of the environment do not count."""
    global _current
    if _current is None:
        _current = read(os.environ)
    return _current


def turn_off() -> None:
    """Lets :func:`current` return switches with everything off, whatever the environment says."""
    global _current
    _current = Switches(enabled=False)


_current: Switches | None = None


def _on_or_off(name: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in OFF:
        return False
    if value in ON or not value:  # every such switch is on by default
        return True
    raise _invalid(name, environ[name])


def _one_of(values: tuple[str, ...], name: str, environ: Mapping[str, str]) -> str:
    value = environ.get(name, "").strip().lower() or _default(name)
    if value not in values:
        raise _invalid(name, environ[name])
    return value


def _seconds(name: str, environ: Mapping[str, str]) -> float | None:
    text = environ.get(name, "").strip() or _default(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise _invalid(name, environ[name])
    return value


def _default(name: str) -> str:
    return next(row[2] for row in TABLE if row[0] == name)


def _invalid(name: str, value: str) -> SwitchError:
    valid = next(row[1] for row in TABLE if row[0] == name)
    return SwitchError(f"{name}={value!r} is not valid; the valid values are {valid}.")
