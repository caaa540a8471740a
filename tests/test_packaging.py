"""Wheel, source archive and editable install: each gives every module under its one name, without torch where none is needed."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.timeout(600)  # the compiled parts are built several times, on a machine that may do other things
HERE = Path(__file__).resolve().parent.parent
LINKED = ("tiers", "clients", "kernels", "proto")
# Modules that may need what an extra or another venv brings, or pytest; all others import with the base dependencies alone.
EXTRAS = (
    r"kvstore\.(worker|front|kernels|testing|tiers\.hbm|bench\.(multiturn|(peers|load)\.drive_\w+)"
    r"|clients\.(vllm|sglang|transformers)(_\w+)?)\b.*"
)
IMPORT_ALL = f"""
import importlib.util, os, pkgutil, re, sys
import kvstore
for heavy in ("torch", "transformers", "cupy"):
    assert importlib.util.find_spec(heavy) is None, heavy
found = pkgutil.walk_packages(kvstore.__path__, "kvstore.", onerror=lambda name: None)
libraries = ("kvstore.native._core", "kvstore.kernels.cpu._native")  # no modules
names = ["kvstore"] + [info.name for info in found if info.name not in libraries]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not re.fullmatch({EXTRAS!r}, name) or error.name.startswith("kvstore"):
            raise
files = {{}}
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None)
    if file and (name.startswith("kvstore") or os.path.realpath(file).startswith(os.path.dirname(os.path.realpath(kvstore.__file__)))):
        files.setdefault(os.path.realpath(file), set()).add(name)
assert all(len(each) == 1 for each in files.values()), files
for name in ("tiers", "clients", "proto"):
    assert importlib.util.find_spec(name) is None, name
print(*names, sep="\\n")
"""


def _sources(suffix: str = "") -> Iterator[str]:
    """Every source file as it must be installed: kvstore/tiers/nvme.py for tiers/nvme.py."""
    for top in ("kvstore", *LINKED):
        for path in sorted((HERE / top).rglob("*")):
            inside = path.relative_to(HERE / top)
            linked = top == "kvstore" and inside.parts[0] in LINKED
            built = "__pycache__" in inside.parts or path.suffix == ".so"
            if path.is_file() and not linked and not built and path.name.endswith(suffix):
                yield str(Path("kvstore", *([top] if top != "kvstore" else []), inside))


def _module_names() -> set[str]:
    return {re.sub(r"(/__init__)?\.py$", "", path).replace("/", ".") for path in _sources(".py")}


@pytest.fixture(scope="module", autouse=True)
def _each_source_is_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of the three builds the second and third find the objects of the first, where they give the compiler the same words and text."""
    with pytest.MonkeyPatch.context() as patch:
        if compiler := sysconfig.get_config_var("CC"):
            words = [sys.executable, str(HERE / "tests" / "compile_once.py"), str(tmp_path_factory.mktemp("objects"))]
            patch.setenv("CC", " ".join([*words, compiler]))
        yield


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree, copied so that no build leaves anything in it."""
    target = tmp_path_factory.mktemp("tree") / "kvstore"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "*.so")
    shutil.copytree(HERE, target, symlinks=True, ignore=skipped)
    return target


@pytest.fixture(scope="module")
def archives(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, the wheel made from it, and in tree/ the wheel made from the tree."""
    out = tmp_path_factory.mktemp("archives")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy))
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(out / "tree"), str(copy))
    return out


def _run(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _wheel(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def _base_environment(folder: Path) -> Path:
    """A virtual environment with the base dependencies, linked from this one, and the build backend; returns its python."""
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    site = next((folder / "lib").glob("python*")) / "site-packages"
    declared = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    waiting, seen = [Requirement("setuptools"), *map(Requirement, declared)], set()
    while waiting:
        wanted = waiting.pop()
        if wanted.name in seen or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(wanted.name)
        found = importlib.metadata.distribution(wanted.name)
        waiting += map(Requirement, found.requires or ())
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(str(found.locate_file(top)))
    return folder / "bin" / "python"


def _check_install(python: Path, *what: str) -> None:
    """Install into a base environment, import everything, and run the command, all from a folder that holds no sources."""
    _run(sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", *what)
    elsewhere = python.parent
    assert set(_run(str(python), "-I", "-c", IMPORT_ALL, cwd=elsewhere).split()) == _module_names()
    assert _run(str(elsewhere / "kvstore"), "--version", cwd=elsewhere).startswith("kvstore ")


def test_a_wheel_holds_every_source_file_once(archives: Path) -> None:
    held = [name for name in zipfile.ZipFile(_wheel(archives / "tree")).namelist() if ".dist-info/" not in name]
    libraries = [name for name in held if re.fullmatch(r"kvstore/(native/_core|kernels/cpu/_native)[^/]*\.so", name)]
    assert len(libraries) == (2 if shutil.which("cc") else 0)
    assert sorted(set(held) - set(libraries)) == sorted(_sources())


def test_the_source_archive_makes_the_same_wheel(archives: Path) -> None:
    from_tree, from_archive = (zipfile.ZipFile(_wheel(folder)).namelist() for folder in (archives / "tree", archives))
    assert sorted(from_tree) == sorted(from_archive)


def test_a_wheel_installs_without_torch(archives: Path, tmp_path: Path) -> None:
    _check_install(_base_environment(tmp_path / "venv"), str(_wheel(archives)))


def test_an_editable_install_imports_the_same_modules(copy: Path, tmp_path: Path) -> None:
    _check_install(_base_environment(tmp_path / "venv"), "-e", str(copy))


@pytest.mark.parametrize("folder", LINKED)
def test_a_linked_folder_is_no_package_of_its_own(folder: str) -> None:
    code = f"import {folder}\n{folder}.anything"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f"write 'import kvstore.{folder}'" in done.stderr


@pytest.mark.parametrize("folder", LINKED)
def test_a_linked_folder_is_a_relative_link(folder: str) -> None:
    assert str((HERE / "kvstore" / folder).readlink()) == f"../{folder}"
