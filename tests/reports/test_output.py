"""What a failing rank has written is shown without what TensorFlow writes on every rank."""

from pathlib import Path

from kdist.reports import scope_marks
from kdist.reports.job_failure import JobFailure
from kdist.reports.output import without_startup_lines

OF_TENSORFLOW = b"""WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795632424.849653     705 port.cc:153] oneDNN custom operations are on.
E0000 00:00:1795632447.896007     705 cuda_platform.cc:52] failed call to cuInit: INTERNAL
To enable the following instructions: AVX2, rebuild TensorFlow with the appropriate compiler flags.
2026-11-25 19:05:27.970046: I tensorflow/core/framework/local_rendezvous.cc:407] Local rendezvous is aborting with \
status: OUT_OF_RANGE: End of sequence
\t [[{{node IteratorGetNext}}]]
"""
OF_THE_RANK = b"""loaded train.csv
2026-11-25 19:05:27.970046: E tensorflow/core/kernels/io.cc:1] no such file
\t [[{{node ReadFile}}]]
[kdist] rank 1 of 2 on host vm raised ValueError:
"""


def test_what_tensorflow_says_on_every_rank_is_left_out():
    assert without_startup_lines(OF_TENSORFLOW + OF_THE_RANK + OF_TENSORFLOW) == OF_THE_RANK


def test_a_directory_that_something_has_removed_ends_no_job(tmp_path):
    """As a job that cleans /tmp does."""
    assert scope_marks.read(str(tmp_path / "removed")).problem() == ""


def test_a_path_need_not_be_text():
    JobFailure(str(Path(b"/data/donn\xe9es/train.py".decode(errors="surrogateescape"))))
