"""What is installed is what the repository says."""

import importlib.metadata
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import tdbridge

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True
    )
    return folder


def test_the_version_is_that_of_the_distribution():
    assert tdbridge.__version__ == importlib.metadata.version("tdbridge")
    assert tdbridge.__version__ == PYPROJECT["project"]["version"]


def test_the_wheel_holds_every_module_and_the_marker_of_types_and_nothing_else(built: Path):
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "tdbridge").rglob("*.py")}
    assert names == modules | {"tdbridge/py.typed"}


def test_the_wheel_carries_the_license(built: Path):
    (wheel,) = built.glob("*.whl")
    assert any(name.endswith("/licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_the_source_distribution_holds_the_tests_and_no_build_products(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kept = {"pyproject.toml", "LICENSE", "conftest.py", "tdbridge/py.typed", "tests/conftest.py"}
    assert kept <= names
    assert not [n for n in names if n.startswith(("docs/_build", ".venv")) or "__pycache__" in n]


def test_every_dependency_is_pinned_in_the_tested_set():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {
        normal(line.partition("==")[0]) for line in lines if line and not line.startswith("#")
    }
    groups = [
        PYPROJECT["project"]["dependencies"],
        *PYPROJECT["project"]["optional-dependencies"].values(),
    ]
    named = {normal(requirement.partition(">=")[0]) for group in groups for requirement in group}
    assert {name for name in named if not name.startswith("tdbridge[")} <= pinned


def normal(name: str) -> str:
    return name.replace("_", "-").lower()
