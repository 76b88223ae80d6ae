"""Horovod's source: its hash and the patches."""

import pytest

from kdist.errors import InstallError
from kdist.install import source


def test_a_version_is_pinned_by_its_hash():
    line = source.requirement("0.28.1")
    assert line.startswith("horovod==0.28.1 --hash=sha256:92a43f5a")
    with pytest.raises(InstallError, match=r"--version 0\.1.*Expected one of .*0\.28\.1"):
        source.requirement("0.1")


XLA, BINDING = source.PATCHES


def test_the_file_that_does_not_compile_is_left_out(tmp_path):
    kept = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")\n'
    listing = written(tmp_path, XLA, kept + kept.replace("mpi_ops", "xla_mpi_ops"))
    source._apply(XLA, str(tmp_path))
    assert listing.read_text() == kept


def test_options_of_open_mpi_are_patched(tmp_path):
    before = "# No process binding args\n_NO_BINDING_ARGS = ['-bind-to none', '-map-by slot']\nx = _NO_BINDING_ARGS\n"
    code = written(tmp_path, BINDING, before)
    source._apply(BINDING, str(tmp_path))
    assert code.read_text() == before.replace("'-", "'--")


@pytest.mark.parametrize("patch", source.PATCHES)
@pytest.mark.parametrize("text", ["", "{0}\n{0}\n", None])
def test_an_unexpected_source_is_refused(tmp_path, patch, text):
    if text is not None:
        written(tmp_path, patch, text.format(patch.mark + patch.old))
    with pytest.raises(InstallError, match="cannot be patched"):
        source._apply(patch, str(tmp_path))


def written(tmp_path, patch, text):
    path = tmp_path.joinpath(*patch.path)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path
