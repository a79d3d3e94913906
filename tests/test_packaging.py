"""What a wheel and an editable install carry, in fresh virtual environments and without a network."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from interpreters import ROOT, environment, python, write

from ddpfix import _switches

SOURCES = ("ddpfix", "setup.cfg", "pyproject.toml", "LICENSE", "README.md")


def checkout(directory: Path) -> Path:
    """A clean copy, so that no build directory of an earlier build gets into the wheel, and none is left in this checkout."""
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        elif source.exists():
            shutil.copy2(source, directory / name)
    return directory


def pip(*arguments: str, executable: Path) -> None:
    """Runs the pip of this environment for another one."""
    command = [sys.executable, "-m", "pip", "--python", str(executable), *arguments]
    result = subprocess.run(command, env=environment(PYTHONPATH=None), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The interpreter of a new virtual environment which sees the packages of this one, but no ddpfix."""
    directory = tmp_path / "fresh"
    venv.create(directory, with_pip=False)
    executable = directory / ("Scripts" if os.name == "nt" else "bin") / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(python("-c", where, env=environment(PYTHONPATH=None), executable=executable).stdout.strip())
    # A directory that is named in a .pth file is searched; the .pth files in it, such as that of an editable ddpfix, are not read.
    (site / "packages_of_the_tests.pth").write_text("".join(f"{path}\n" for path in sys.path if "site-packages" in path))
    absent = "import importlib.util, wrapt; print(importlib.util.find_spec('ddpfix'))"
    assert python("-c", absent, env=environment(PYTHONPATH=None), cwd=tmp_path, executable=executable).stdout == "None\n"
    return executable


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = checkout(tmp_path_factory.mktemp("checkout"))
    target = tmp_path_factory.mktemp("wheel")
    pip(
        *("wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(target), str(source)),
        executable=Path(sys.executable),
    )
    [file] = target.glob("*.whl")
    return file


def test_the_wheel_carries_the_whole_package_and_nothing_else(wheel: Path) -> None:
    expected = {str(file.relative_to(ROOT)) for suffix in ("*.py", "py.typed") for file in (ROOT / "ddpfix").rglob(suffix)}
    assert {"ddpfix/py.typed", "ddpfix/bootstrap/sitecustomize.py", "ddpfix/__main__.py"} <= expected
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("LICENSE") for name in names)


def test_the_metadata(wheel: Path) -> None:
    import ddpfix

    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_string(archive.read(name).decode())
    assert (metadata["Name"], metadata["Version"]) == ("ddpfix", ddpfix.__version__)
    assert "MIT" in (metadata["License"], metadata["License-Expression"])
    assert metadata["Requires-Python"] == ">=3.9"
    required = {value for value in metadata.get_all("Requires-Dist", []) if "extra" not in value}
    assert required == {"torch>=2.1", "wrapt>=2.4"}
    assert {"test", "lint"} <= set(metadata.get_all("Provides-Extra", []))


def works(executable: Path, directory: Path, location: Path) -> None:
    """An installed ddpfix does all that a checkout does, from another directory."""
    env = environment(PYTHONPATH=None, DDPFIX_DISABLE="barrier,join")
    script = write(directory / "elsewhere" / "script.py", "import sys; print(sys.modules['ddpfix']._switched_on_by)")
    settings = dict(env=env, cwd=script.parent, executable=executable)
    bootstrap = python("-m", "ddpfix", "--path", **settings).stdout.strip()
    assert Path(bootstrap).resolve() == (location / "bootstrap").resolve() and (Path(bootstrap) / "sitecustomize.py").exists()
    assert python("-m", "ddpfix", script, **settings).stdout == "python -m ddpfix\n"
    settings["env"] = {**env, "PYTHONPATH": bootstrap}
    assert python(script, **settings).stdout == "sitecustomize\n"
    settings["env"] = env
    assert f"in {location.resolve()}\n" in python("-m", "ddpfix", "--status", **settings).stdout


def test_an_installed_wheel_works(wheel: Path, fresh: Path, tmp_path: Path) -> None:
    pip("install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel), executable=fresh)
    where = python("-c", "import ddpfix; print(ddpfix.__file__)", env=environment(PYTHONPATH=None), cwd=tmp_path, executable=fresh)
    location = Path(where.stdout.strip()).parent
    assert (tmp_path / "fresh") in location.parents
    works(fresh, tmp_path, location)
    # -I: without the current directory, which is what it takes to see that this combination is refused
    result = python("-I", "-m", "ddpfix", tmp_path / "elsewhere" / "script.py", executable=fresh, code=2)
    assert "import ddpfix" in result.stderr


def test_an_editable_install_works(fresh: Path, tmp_path: Path) -> None:
    source = checkout(tmp_path / "checkout")
    pip(
        *("install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--ignore-installed", "--editable", str(source)),
        executable=fresh,
    )
    works(fresh, tmp_path, source / "ddpfix")


def test_pyproject_says_how_to_build_and_nothing_else() -> None:
    """The metadata has one home, setup.cfg; pip refuses a directory with neither setup.py nor pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"^\[(.*)\]$", text, re.MULTILINE) == ["build-system"]
    assert not (ROOT / "setup.py").exists()


def test_the_readme_names_every_switch_and_no_other() -> None:
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"\bDDPFIX(?:_[A-Z_]+)?\b", text)) == {row[0] for row in _switches.TABLE}


def test_the_public_surface() -> None:
    import ddpfix

    assert sorted(ddpfix.__all__) == ["CollectiveMismatchError", "__version__", "patch", "status", "unpatch"]
    for name in ddpfix.__all__:
        assert name == "__version__" or getattr(ddpfix, name).__doc__
