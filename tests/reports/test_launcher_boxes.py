"""What mpirun says of a failure is left out once a rank has reported it, and nothing else is, in pieces of any size."""

import pytest

from kdist.reports.launcher_boxes import BoxFilter

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


def filtered(text, size, script="/work/train.py"):
    boxes, data = BoxFilter(script), text.encode()
    shown = b"".join(boxes.feed(data[start : start + size]) for start in range(0, len(data), size))
    return (shown + boxes.finish()).decode()


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


def test_output_is_not_held_back_before_a_failure():
    boxes = BoxFilter()
    assert boxes.feed(b"50 %") == b"50 %"
    assert boxes.feed(b"\r100 %\n" + RULE.encode()) == b"\r100 %\n" + RULE.encode()
    assert boxes.summary(1) == ""


HINT = "; --output DIR keeps the output of each rank"


def summary(text, output=None):
    boxes = BoxFilter("/work/train.py")
    boxes.feed(text.encode())
    return boxes.summary(1, output)


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
    exited = "[kdist] rank 0 of 2 on host vm exited with code 7\n"
    assert summary(exited) == f"rank 0 of 2 on host vm exited with code 7; the job's exit code is 1{HINT}"


def test_the_summary_ends_with_the_fix_that_kdist_knows():
    error = "kdist.errors.DataError: No. Received: 1. Expected 2. Fix: `a Fix: b`, or c.\n"
    assert summary(REPORT.replace("ValueError: boom\n", error)).splitlines()[1:] == ["Fix: b`, or c."]
    assert "\n" not in summary(REPORT.replace("ValueError: boom", "ValueError: Fix: it"))
    ended = "[kdist] rank 0 of 2 on host vm ends the job: rank 1 died. Received: nothing. Fix: read.\n"
    assert summary(ended) == (
        f"rank 0 of 2 on host vm ended the job: rank 1 died; the job's exit code is 1{HINT}\nFix: read."
    )


def test_the_summary_of_a_rank_that_only_mpirun_reports():
    killed = f"{RULE}prterun noticed that process rank 1 with PID 0 on node vm exited on\nsignal 9 (Killed).\n{RULE}"
    assert summary(killed).startswith("rank 1 on host vm was killed by signal 9 (SIGKILL); the job's exit code is 1")
    assert "out of memory" in summary(killed).splitlines()[-1]
    exited = f"{RULE}prterun detected that\n\n   Process name: [prterun-vm-7@1,3]\n   Exit code:    5\n{RULE}"
    assert summary(exited).startswith("rank 3 exited with code 5, without a message; ")
