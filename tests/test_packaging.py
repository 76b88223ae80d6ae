"""What a wheel holds: the package, its callbacks under kdist, its types, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kdist

ROOT = Path(__file__).parents[1]


def wheel_content(source: Path, into: Path) -> set[str]:
    """Builds a wheel of a source tree and returns the names of the files in it."""
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(into)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = into.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture
def tree(tmp_path):
    """A copy of what a wheel is made of: building leaves files behind."""
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("kdist", "callbacks"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def complaints(content: set[str], tree: Path) -> list[str]:
    """Returns what is wrong with a wheel's content."""
    modules = {str(path.relative_to(tree)) for path in (tree / "kdist").rglob("*.py")}
    modules |= {f"kdist/{path.relative_to(tree)}" for path in (tree / "callbacks").rglob("*.py")}
    packed = {name for name in content if ".dist-info/" not in name}
    wrong = [f"{name} is missing" for name in sorted({*modules, "kdist/py.typed"} - packed)]
    wrong += [f"{name} does not belong there" for name in sorted(packed - modules - {"kdist/py.typed"})]
    if not any(name.endswith("LICENSE") for name in content):
        wrong.append("the license is missing")
    return wrong


def test_the_wheel_holds_kdist_and_nothing_else(tree, tmp_path):
    content = wheel_content(tree, tmp_path / "dist")
    assert complaints(content, tree) == []
    assert not any(name.startswith("callbacks") for name in content)
    assert f"kdist-{kdist.__version__}.dist-info/METADATA" in content


def test_a_package_that_setup_cfg_forgets_is_seen(tree, tmp_path):
    config = tree / "setup.cfg"
    config.write_text(config.read_text().replace("    kdist.launch\n", "    callbacks\n"))
    (tree / "kdist" / "py.typed").unlink()
    said = complaints(wheel_content(tree, tmp_path / "dist"), tree)
    assert "kdist/launch/worker.py is missing" in said
    assert "kdist/py.typed is missing" in said
    assert "callbacks/__init__.py does not belong there" in said


def test_the_checkout_has_the_same_callbacks():
    link = ROOT / "kdist" / "callbacks"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "callbacks"
