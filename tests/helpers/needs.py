"""Marks for tests of what an environment may lack; `tests/run`, and so CI, lets none of them be skipped."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.helpers.slurm import missing

horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None and "KDIST_TEST_SKIPS_NOTHING" not in os.environ,
    reason="Horovod is not installed; `kdist install-horovod` builds it",
)

mpich = pytest.mark.skipif(
    not os.environ.get("KDIST_TEST_MPICH_PYTHON") and "KDIST_TEST_SKIPS_NOTHING" not in os.environ,
    reason="KDIST_TEST_MPICH_PYTHON names no environment with MPICH",
)

intel_mpi = pytest.mark.skipif(
    not os.environ.get("KDIST_TEST_INTEL_MPI_PYTHON"),
    reason="no environment with Intel MPI, whose wheel is for x86-64 only",
)

slurm = pytest.mark.skipif(
    bool(missing()) and "KDIST_TEST_SLURM" not in os.environ,
    reason=f"no Slurm can be started: {missing()}",
)

keras_source = pytest.mark.skipif(
    not os.environ.get("KDIST_TEST_KERAS_SOURCE"),
    reason="KDIST_TEST_KERAS_SOURCE names no source distribution of Keras",
)
