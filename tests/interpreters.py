"""Runs programs in interpreters of their own, as a user would start them, each under a hard time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BOOTSTRAP = str(ROOT / "ddpfix" / "bootstrap")


def environment(**changes: str | None) -> dict[str, str]:
    """The environment of a user who has set nothing, with this checkout importable; ``None`` takes a name out."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("DDPFIX", "PYTHON", "RANK", "LOCAL_", "WORLD_"))}
    keep["PYTHONPATH"] = str(ROOT)
    for name, value in changes.items():
        if value is None:
            keep.pop(name, None)
        else:
            keep[name] = value
    return keep


def path(*directories: Any) -> str:
    """A value for ``PYTHONPATH``: the directories, then this checkout."""
    return os.pathsep.join([*map(str, directories), str(ROOT)])


def python(
    *arguments: Any,
    cwd: Any = None,
    env: dict[str, str] | None = None,
    timeout: float = 60,
    executable: Any = sys.executable,
    code: int | None = 0,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Runs ``python *arguments``; fails unless it exits with ``code``."""
    result = subprocess.run(
        [str(executable), *map(str, arguments)],
        cwd=cwd,
        env=environment() if env is None else env,
        timeout=timeout,
        capture_output=True,
        text=True,
        input=stdin,
    )
    if code is not None:
        assert result.returncode == code, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def write(file: Path, source: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(source))
    return file
