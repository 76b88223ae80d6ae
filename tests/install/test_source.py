"""Horovod's source: its hash, and the one change."""

import pytest

from kdist.errors import InstallError
from kdist.install import source


def test_a_version_is_pinned_by_its_hash():
    line = source.requirement("0.28.1")
    assert line.startswith("horovod==0.28.1 --hash=sha256:92a43f5a")
    with pytest.raises(InstallError, match=r"--version 0\.1.*Expected one .*0\.28\.1"):
        source.requirement("0.1")


@pytest.fixture
def listing(tmp_path):
    path = tmp_path / "horovod" / "tensorflow" / "CMakeLists.txt"
    path.parent.mkdir(parents=True)
    return path


def test_the_file_that_does_not_compile_is_left_out(listing, tmp_path):
    kept = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")\n'
    listing.write_text(kept + kept.replace("mpi_ops", "xla_mpi_ops"))
    source._leave_out_xla(str(tmp_path))
    assert listing.read_text() == kept


@pytest.mark.parametrize("text", ["", "xla_mpi_ops.cc\nxla_mpi_ops.cc\n", None])
def test_another_source_than_expected_is_refused(listing, tmp_path, text):
    if text is not None:
        listing.write_text(text)
    with pytest.raises(InstallError, match="not as known"):
        source._leave_out_xla(str(tmp_path))
