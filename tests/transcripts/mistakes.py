"""The mistakes, how each is made, and what is compared of its output: what kdist and launchers say."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.helpers import spmd

HERE = Path(__file__).parent
SCRIPTS, EXPECTED = HERE / "scripts", HERE / "expected"
MAX_LINES = 12

# Ctrl-C reaches `kdist run` in a terminal. A shell that runs tests in the background lets its children ignore SIGINT,
# and so would `kdist run`, which then does not end its job: it is started with the usual handling.
_INTERRUPTIBLE = (
    "import os, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "os.environ['LAUNCHER'] = str(os.getpid())\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A command with a mistake in it, or in its script.

    Attributes:
        command: str, as typed after `program`; DIR is a new directory.
        code: int, its exit code.
        env: mapping, the variables that are set.
        needs_jax: bool, whether its script imports JAX, which tests hide from ranks.
        is_any_rank: bool, whether either rank may report it: both make the same mistake.
        ends_with: str, a regular expression of the last line where kdist knows no fix: it is the line to look at.
        has_frame: str, a frame of the stacks that are shown, which the transcript leaves out.
        program: str, `"kdist"`, or `"python"` for a rank that another launcher has started, as the variables tell.
    """

    command: str
    code: int
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_any_rank: bool = False
    needs_jax: bool = False
    ends_with: str = r"\bFix: |; did you mean "
    has_frame: str = ""
    program: str = "kdist"

    @property
    def typed(self) -> str:
        """The whole command."""
        return f"{self.program} {self.command}"


_RAISED = r" raised \w+ in \w+\.py:\d+; "  # an error of the script's own
_EXITED = " exited with code 1: --epochs must be given; "

MISTAKES = {
    # Of the command line: nothing is started.
    "misspelled_command": Mistake("rnu -np 2 scope_only.py", 2),
    "unknown_option": Mistake("run -np 2 --ouput logs scope_only.py", 2),
    "no_number_of_ranks": Mistake("run scope_only.py", 2),
    "number_in_words": Mistake("run -np two scope_only.py", 2),
    "no_script": Mistake("run -np 2", 2),
    "missing_script": Mistake("run -np 2 trian.py", 2),
    "directory_as_script": Mistake("run -np 2 .", 2),
    "option_of_python": Mistake("run -np 2 python -O scope_only.py", 2),
    "too_few_slots": Mistake("run -H localhost:2 -np 4 scope_only.py", 2),
    "unknown_strategy": Mistake("run -np 2 --strategy mip scope_only.py", 2),
    "wrong_value_of_a_variable": Mistake("run -np 2 scope_only.py", 2, {"KDIST_SCALE_LR": "lots"}),
    "unknown_level": Mistake("run -np 2 scope_only.py", 2, {"KDIST_LOG": "loud"}),
    "unknown_option_of_mpirun": Mistake("run -np 2 --launcher-args=--no-such-option scope_only.py", 213),
    # Of scripts that do not get as far as TensorFlow.
    "missing_module": Mistake("run -np 2 missing_module.py", 1, is_any_rank=True, ends_with=_RAISED),
    "misspelled_module": Mistake("run -np 2 -m trian", 1, is_any_rank=True, ends_with=r" raised ImportError; "),
    "syntax_error": Mistake("run -np 2 syntax_error.py", 1, is_any_rank=True, ends_with=_RAISED),
    "syntax_error_over_collectives": Mistake(
        "run -np 2 --strategy collective syntax_error.py", 1, is_any_rank=True, ends_with=_RAISED
    ),
    "raised_from_another": Mistake("run -np 2 raised_from_another.py", 1, is_any_rank=True, ends_with=_RAISED),
    "bad_option": Mistake("run -np 2 bad_option.py", 1, is_any_rank=True),
    "misspelled_argument": Mistake("run -np 2 misspelled_argument.py", 1, is_any_rank=True),
    "exit_with_a_message": Mistake("run -np 2 exit_with_a_message.py", 1, is_any_rank=True, ends_with=_EXITED),
    "breakpoint_on_two_ranks": Mistake("run -np 2 breakpoint_on_two_ranks.py", 0),
    "interrupted": Mistake("run -np 2 interrupted.py", 130, ends_with="^kdist: SIGINT: the job has ended$"),
    "rank_killed": Mistake("run -np 2 rank_killed.py", 137),
    "rank_killed_over_collectives": Mistake("run -np 2 --strategy collective rank_killed.py", 137),
    "rank_killed_over_horovod": Mistake("run -np 2 --strategy horovod rank_killed.py", 137),
    "rank_killed_over_gloo": Mistake("run -np 2 --strategy horovod --launcher-args=--gloo rank_killed.py", 1),
    "all_but_one_raise": Mistake(
        "run -np 3 --strategy collective all_but_one_raise.py", 1, is_any_rank=True, ends_with=_RAISED
    ),
    "rank_exits_without_a_word": Mistake("run -np 2 rank_exits_without_a_word.py", 5),
    # Of whole trainings.
    "misspelled_variable": Mistake("run -np 1 scope_only.py", 0, {"KDIST_SCALE_RL": "linear"}),
    "other_backend": Mistake("run -np 2 scope_only.py", 1, {"KERAS_BACKEND": "jax"}, is_any_rank=True, needs_jax=True),
    # Hydra's mpirun beside an mpi4py of Open MPI: each process is rank 0 of 1.
    "wrong_mpi": Mistake(
        "scope_only.py",
        1,
        {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
        program="python",
    ),
    "more_ranks_than_samples": Mistake("run -np 3 few_samples.py", 0),
    "fit_outside_of_the_scope": Mistake("run -np 2 fit_outside.py", 0),
    "scope_without_with": Mistake("run -np 2 scope_without_with.py", 0),
    "wrong_indent": Mistake("run -np 2 wrong_indent.py", 0),
    "unseeded_split": Mistake("run -np 2 unseeded_split.py", 1, is_any_rank=True),
    "evaluate_on_one_rank": Mistake("run -np 2 evaluate_on_one_rank.py", 1),
    "evaluate_between_fits": Mistake("run -np 2 evaluate_between_fits.py", 1),
    "stall": Mistake("run -np 2 --output DIR stall.py", 1, has_frame="in batches"),
    "file_of_all_ranks": Mistake("run -np 2 file_of_all_ranks.py", 1, is_any_rank=True),
    "rank_raises": Mistake("run -np 2 rank_raises.py", 1, ends_with=_RAISED),
    "rank_ends_early": Mistake("run -np 2 rank_ends_early.py", 1),
}


def transcript(name: str) -> str:
    """Makes a mistake; returns the command, what kdist said of it, and the exit code.

    Args:
        name: str, a key of `MISTAKES`.
    """
    mistake = MISTAKES[name]
    program = [sys.executable, *(["-m", "kdist.cli.main"] if mistake.program == "kdist" else [])]
    # The lines that tell of the start, and of a slow one, are not of interest.
    packages = spmd.EVERY_PACKAGE if mistake.needs_jax else spmd.RANK_ENVIRONMENT
    path = os.pathsep.join(filter(None, (str(HERE.parents[1]), packages["PYTHONPATH"])))  # this checkout's kdist
    env = {**spmd.RANK_ENVIRONMENT, "PYTHONPATH": path, "KDIST_LOG": "warning", "COLUMNS": "100", **mistake.env}
    with tempfile.TemporaryDirectory() as directory:
        words = mistake.command.replace("DIR", directory).split()
        done = spmd.execute([sys.executable, "-c", _INTERRUPTIBLE, *program, *words], env=env, cwd=SCRIPTS, timeout=300)
    assert not done.timed_out, done.output
    assert mistake.has_frame in done.output, done.output
    said = said_by_kdist(done.output.replace(directory, "DIR"), is_any_rank=mistake.is_any_rank)
    variables = "".join(f"{variable}={value} " for variable, value in mistake.env.items())
    return "\n".join([f"$ {variables}{mistake.typed}", *said, f"exit code {done.returncode}", ""])


_OF_KDIST = re.compile(r"(\[kdist\] |kdist( \S+)?: )")
_OF_A_LAUNCHER = re.compile(r"-{60,}|(?!kdist: ).*(prterun|mpirun|MPI_ABORT|exit with status code|remaining workers)")
_TRACEBACK = "Traceback (most recent call last):"
_RAISES = re.compile(r"\[kdist\] rank \d+ of .* raised \w+:")  # a syntax error follows without the line above
_MARKERS = re.compile(r"[\s~^]+")  # below a line of a traceback, from Python 3.11 on
# What a busy machine says: of a start that is slow, of ranks that share cores, of a rank that is late.
_OF_A_BUSY_MACHINE = re.compile(
    r"have not started|no rank has reached kdist.scope\(\) for|share \d+ core|Fix: check what blocks it"
)


def said_by_kdist(output: str, *, is_any_rank: bool) -> list[str]:
    """Returns the lines of kdist and of launchers, and the tracebacks, without what varies.

    Args:
        output: str, of a job.
        is_any_rank: bool, whether the numbers of ranks are left out where one reports.
    """
    said: list[str] = []
    in_traceback = False
    for line in output.replace("\r", "\n").splitlines():
        if line.startswith(_TRACEBACK):
            in_traceback = True
            continue
        is_part = in_traceback and not _MARKERS.fullmatch(line)
        in_traceback = in_traceback and line.startswith(" ")
        if (is_part or _OF_KDIST.match(line) or _OF_A_LAUNCHER.match(line)) and not _OF_A_BUSY_MACHINE.search(line):
            said.append(_without_what_varies(line, is_any_rank=is_any_rank))
        in_traceback = in_traceback or _RAISES.fullmatch(line) is not None
    return said


def _without_what_varies(line: str, *, is_any_rank: bool) -> str:
    for place, word in ((str(SCRIPTS), "..."), (os.path.realpath(SCRIPTS), "..."), (sys.executable, "PYTHON")):
        line = line.replace(place, word)
    line = re.sub(r"on host \S+", "on host HOST", line.replace(platform.node(), "HOST"))
    line = re.sub(r"\bPID \d+", "PID", re.sub(r"\b\d+(\.\d+)? s\b", "N s", line))
    return re.sub(r"\brank \d+ of", "rank N of", line) if is_any_rank else line
