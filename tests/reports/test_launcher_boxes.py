"""What mpirun and horovodrun say of a known failure is left out, and nothing else is, in pieces of any size."""

import pytest

from kdist.reports.job_failure import FIX_OF_A_HOST, JobFailure
from kdist.reports.launcher_boxes import BoxFilter, UnlabelledFilter
from kdist.restarts.events import Failure, Kind, OwnReports

RULE = "-" * 74 + "\n"
BOX = f"{RULE}prterun detected that one or more processes exited with non-zero status,\nExit code: 3\n{RULE}"
BOX_OF_THE_SCRIPT = f"{RULE}my own table\n{RULE}"
REPORT = """[kdist] rank 1 of 2 on host vm raised ValueError:
Traceback (most recent call last):
  File "/work/train.py", line 12, in <module>
    main()
  File "/work/data.py", line 3, in main
    raise ValueError("boom")
ValueError: boom
"""


def filtered(text, size, kind=BoxFilter):
    lines, data = kind(JobFailure("/work/train.py")), text.encode()
    shown = b"".join(lines.feed(data[start : start + size]) for start in range(0, len(data), size))
    return (shown + lines.finish()).decode()


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"a\n{BOX}b", f"a\n{BOX}b"),  # nobody has said why
        (f"a\n{REPORT}{BOX}b", f"a\n{REPORT}b"),
        (f"{REPORT}{BOX}{BOX}", REPORT),
        (f"{REPORT}{BOX}\0", REPORT),
        (f"{REPORT}{BOX_OF_THE_SCRIPT}{BOX}b\n", f"{REPORT}{BOX_OF_THE_SCRIPT}b\n"),
        (f"{REPORT}{RULE}prterun noticed", REPORT),  # it was killed meanwhile
        (f"{REPORT}[vm:31662] PMIX ERROR: PMIX_ERR_UNREACH in file x\n", REPORT),
        ("[kdist] rank 0 of 2 waits\n" + BOX, "[kdist] rank 0 of 2 waits\n" + BOX),
    ],
)
def test_what_is_shown(text, shown, size):
    assert filtered(text, size) == shown


KILLED = f"{RULE}prterun noticed that process rank 1 with PID 0 on node vm exited on\nsignal 9 (Killed).\n{RULE}"


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_a_box_that_names_the_rank_is_left_out(size):
    assert filtered(f"a\n{KILLED}", size) == "a\n"
    assert filtered(f"a\n{RULE}Primary job  terminated normally, but 1 process\n{RULE}{KILLED}b", size) == "a\nb"
    for shown in (f"a\n{RULE}mpirun was unable to launch\n{RULE}b", f"a\n{BOX_OF_THE_SCRIPT}b\n", f"--\n{RULE}"):
        assert filtered(shown, size) == shown


def test_output_is_not_held_back_before_a_failure():
    failure = JobFailure()
    boxes = BoxFilter(failure)
    assert boxes.feed(b"50 %") == b"50 %"
    rule = b"-" * 79 + b"\n"
    assert boxes.feed(b"\r100 %\n" + rule) == b"\r100 %\n" + rule
    assert failure.summary(1) == ""


HINT = "; to keep each rank's output: kdist run --output DIR"


def summary(text, output=None, kind=BoxFilter):
    failure = JobFailure("/work/train.py")
    lines = kind(failure)
    lines.feed(text.encode())
    lines.finish()
    return failure.summary(1, output)


def test_the_summary():
    raised = "rank 1 of 2 on host vm raised ValueError in train.py:12; the job's exit code is 1"
    assert summary(REPORT + BOX) == raised + HINT
    assert (
        summary(REPORT + BOX, "logs") == f"{raised}; its output is in logs/rank1.err, that of the other ranks beside it"
    )
    labelled = "".join(f"[rank 1 12:00:59] {line}\n" for line in REPORT.splitlines())
    assert summary(labelled) == raised + HINT
    said = "[kdist] rank 0 of 2 on host vm exited with code 1: give --epochs\n"
    assert summary(said) == f"rank 0 of 2 on host vm exited with code 1: give --epochs; the job's exit code is 1{HINT}"
    failure = JobFailure()
    failure.read(said.replace("give", "donn\xe9es").strip().encode("latin-1"))
    assert "code 1: donn\ufffdes --epochs; " in failure.summary(1)
    exited = "[kdist] rank 0 of 2 on host vm exited with code 7\n"
    assert summary(exited) == f"rank 0 of 2 on host vm exited with code 7; the job's exit code is 1{HINT}"


def test_the_summary_ends_with_the_fix_that_kdist_knows():
    error = "kdist.errors.DataError: No. Received: 1. Expected 2. Fix: `a Fix: b`, or c.\n"
    assert summary(REPORT.replace("ValueError: boom\n", error)).splitlines()[1:] == ["Fix: b`, or c."]
    assert "\n" not in summary(REPORT.replace("ValueError: boom", "ValueError: Fix: it"))
    misspelled = "TypeError: scope() has no argument 'a'. Received: a. Expected one of b. Fix: did you mean b?"
    assert summary(REPORT.replace("ValueError: boom", misspelled)).endswith("\nFix: did you mean b?")
    ended = "[kdist] rank 0 of 2 on host vm ends the job: rank 1 died. Received: nothing. Fix: read.\n"
    assert summary(ended) == f"rank 1 died; the job's exit code is 1{HINT}\nFix: read."
    assert "; its output is in logs/rank1.err, " in summary(ended, "logs")
    both = "Ranks differ. Received: rank 0 is in a.py:3; rank 1 is in b.py:4. Expected one call. Fix: look.\n"
    assert summary(f"[kdist] rank 0 of 2 on host vm ends the job: {both}", "logs") == (
        "Ranks differ: rank 0 is in a.py:3; rank 1 is in b.py:4; the job's exit code is 1; the output of each rank "
        "is in logs\nFix: look."
    )


def test_the_summary_of_a_rank_that_only_mpirun_reports():
    assert summary(KILLED).startswith("rank 1 on host vm was killed by signal 9 (SIGKILL); the job's exit code is 1")
    assert "out of memory" in summary(KILLED).splitlines()[-1]
    exited = f"{RULE}prterun detected that\n\n   Process name: [prterun-vm-7@1,3]\n   Exit code:    5\n{RULE}"
    assert summary(exited).startswith("rank 3 exited with code 5, without a message; ")
    assert summary(f"{exited}{REPORT}").startswith("rank 1 of 2 on host vm raised ValueError in train.py:12")


@pytest.mark.parametrize("runtime", ["PRTE", "ORTE"])  # of Open MPI 5 and 4
def test_the_summary_of_a_host_that_was_lost(runtime):
    lost = f"{RULE}{runtime} has lost communication with a remote daemon.\n  Remote daemon: [p@0,1] on node b\n{RULE}"
    assert filtered(f"a\n{lost}", 7) == "a\n"
    assert summary(lost) == f"host b was lost; the job's exit code is 1{HINT}\nFix: {FIX_OF_A_HOST}"
    assert "; the output of each rank is in logs\n" in summary(lost, "logs")


def test_the_summary_is_of_the_first_report():
    other = REPORT.replace("rank 1", "rank 0").replace("12", "20")
    assert summary(REPORT + other).startswith("rank 1 of 2 on host vm raised ValueError in train.py:12")


def test_the_summary_of_what_a_launcher_of_kdist_reports(tmp_path):
    failure = JobFailure("train.py", host="vm")
    failure.take(Failure(Kind.EXIT, "exited with code 5", 1))
    failure.take(Failure(Kind.SIGNAL, "was killed by signal 15 (SIGTERM)", 0, "b"))
    exited = "rank 1 on host vm exited with code 5, without a message"
    assert failure.summary(5).startswith(f"{exited}; ")
    own = OwnReports(running=tmp_path, rank=1)
    for place in ("", "`model.fit`, train.py:12", ""):
        own.record_place(place)
    assert failure.summary(5, None, str(tmp_path)).startswith(f"{exited}, last seen in `model.fit`, train.py:12; ")


# Of horovodrun with Gloo, which labels what ranks print.
RANK_0 = "[0]<stderr>:[kdist] 2 ranks\n[0]<stdout>:\r1/16"
OF_RANK_0 = "[kdist] 2 ranks\n\r1/16"
OF_HOROVODRUN = """Process 1 exit with status code 137.
Terminating remaining workers after failure of Process 1.
Traceback (most recent call last):
  File "horovod/runner/launch.py", line 837, in run_commandline
RuntimeError: Horovod detected that one or more processes exited with non-zero status. The first process to do so was:
Process name: 1
Exit code: 137
"""
OF_ITS_RANKS = """[0]<stderr>:W0 local_rendezvous.cc:412] Local rendezvous is aborting with status: UNKNOWN: Horovod
[0]<stderr>:\t [[{{node kdist_sum}}]]
[1]<stderr>:Killed
"""


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
@pytest.mark.parametrize(
    "words", [OF_HOROVODRUN, f"{RULE}prterun\n   Process name: [prterun-vm-7@1,1]\nExit code: 5\n"]
)
def test_what_horovodrun_says_is_left_out_once_it_is_known(words, size):
    shown = filtered(f"Launching\n{OF_ITS_RANKS}{words}{RANK_0}", size, UnlabelledFilter)
    assert shown == f"Launching\n{OF_RANK_0}"


def test_the_last_words_of_a_rank_are_shown():
    assert filtered(f"{OF_HOROVODRUN}[0]<stdout>:half a line", 7, UnlabelledFilter) == "half a line"


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize(
    ("labelled", "shown"),
    [
        (
            "[0]<stdout>:\r[0]<stdout>:1/2 \r[0]<stdout>:2/2\n[1]<stderr>: x [0]<stdout>:\n",
            "\r1/2 \r2/2\n x [0]<stdout>:\n",
        ),
        ("[1,0]<stdout>: Epoch 1\n[1,1]<stdout>: Epoch 1\n", "Epoch 1\nEpoch 1\n"),
    ],
)
def test_what_ranks_print_is_shown_without_the_labels_of_horovodrun(labelled, shown, size):
    assert filtered(labelled, size, UnlabelledFilter) == shown


def test_a_progress_bar_is_shown_as_it_grows():
    lines = UnlabelledFilter(JobFailure())
    shown = [lines.feed(piece) for piece in (b"[0]<stdout>:\r[0]<std", b"out>:1/2 \r", b"[0]<stdout>:2/2", b"\n")]
    assert shown == [b"\r", b"1/2 \r", b"", b"2/2\n"]


@pytest.mark.parametrize(("kind", "label"), [(BoxFilter, b""), (UnlabelledFilter, b"[0]<stderr>:")])
def test_of_a_long_progress_bar_the_end_is_kept(kind, label):
    lines, shown, bar = kind(JobFailure()), b"", label
    for number in range(1000):
        update = b"\r" + label + b"%d/1000" % number
        bar += update
        shown += lines.feed(update if shown else label + update)
        assert len(lines._line) < 50
    bar += b" done\n"
    shown += lines.feed(b" done\n")
    assert shown == bar.replace(label, b"")
    report = b"".join(label + line for line in REPORT.encode().splitlines(keepends=True))
    assert lines.feed(report) == REPORT.encode()
    assert lines._failure.is_known


def test_what_horovodrun_says_is_shown_where_no_rank_is_named():
    words = "Traceback (most recent call last):\n  File\nValueError: no slots\n"
    assert filtered(RANK_0 + "\n" + words, 7, UnlabelledFilter) == OF_RANK_0 + "\n" + words
    assert summary(words, kind=UnlabelledFilter) == ""


def test_horovodruns_streams_end_in_any_order():
    """Each of them says what failed, and is read in a thread of its own."""
    early, traceback, late = OF_HOROVODRUN.partition("Traceback")
    late = traceback + late
    for first, second in ((early, late), (late, early)):
        failure = JobFailure()
        for words in (first, second):
            lines = UnlabelledFilter(failure)
            assert lines.feed(words.encode()) + lines.finish() == b"", words
        assert failure.summary(137).startswith("rank 1 was killed by signal 9 (SIGKILL); ")


def test_horovodrun_ends_no_line_of_a_rank():
    lines = UnlabelledFilter(JobFailure())
    shown = [lines.feed(piece) for piece in (b"[0]<stdout>:\r1/16", b"Process 0 exit with status code 143.", b"\n")]
    assert shown == [b"\r", b"", b"1/16\n"]


def test_the_summary_of_a_rank_of_horovodrun():
    assert summary(OF_HOROVODRUN, kind=UnlabelledFilter).startswith("rank 1 was killed by signal 9 (SIGKILL); ")
    labelled = "".join(f"[1,1]<stderr>: {line}\n" for line in REPORT.splitlines())
    assert summary(labelled + OF_HOROVODRUN, kind=UnlabelledFilter).startswith(
        "rank 1 of 2 on host vm raised ValueError in train.py:12; "
    )
