from __future__ import annotations

import os
import sys
from typing import Any, Iterator

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [path for path in (HERE, os.path.dirname(HERE)) if path not in sys.path]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """The rank processes, shared by all tests of a session."""
    from ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for name in ("test_loops", "test_faults"):
        module = sys.modules.get(name)
        lines = module.table() if module is not None else []
        if len(lines) > 1:
            terminalreporter.section(f"table of {name}")
            for line in lines:
                terminalreporter.write_line(line)
