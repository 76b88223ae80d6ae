"""What mpirun says of a failure is left out once a rank has reported it, and nothing else is, in pieces of any size."""

import pytest

from kdist.launch.launcher_boxes import BoxFilter

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
    return (shown + boxes.finish()).decode(), boxes.summary(1)


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
    assert filtered(text, size)[0] == shown


def test_output_is_not_held_back_before_a_failure():
    boxes = BoxFilter()
    assert boxes.feed(b"50 %") == b"50 %"
    assert boxes.feed(b"\r100 %\n" + RULE.encode()) == b"\r100 %\n" + RULE.encode()
    assert boxes.summary(1) == ""


def test_the_summary():
    summary = "rank 1 of 2 on host vm raised ValueError in train.py:12; the job's exit code is 1"
    assert filtered(REPORT + BOX, 50)[1] == summary
    exited = "[kdist] rank 0 of 2 on host vm exited with code 7\n"
    assert filtered(exited, 50)[1] == "rank 0 of 2 on host vm exited with code 7; the job's exit code is 1"
