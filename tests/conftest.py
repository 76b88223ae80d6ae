"""A test leaves the process as it found it: its environment variables and its threads. In CI, no MPI is no excuse."""

import os
import threading
import time

import hypothesis
import pytest

from tests.helpers import processes
from tests.helpers.processor_time import ProcessorTime

# What pytest sets, and what TensorFlow and Keras set when they are first imported.
MAY_CHANGE = {
    *("PYTEST_CURRENT_TEST", "TF2_BEHAVIOR", "TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION", "HDF5_PLUGIN_PATH"),
    *("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "ENABLE_RUNTIME_UPTIME_TELEMETRY"),
    *("TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY"),
}


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="only the tests that start no processes; see tests/run")


def pytest_configure(config):
    config.addinivalue_line("markers", f"{processes.MARK}: set on each test whose code starts processes")
    config.pluginmanager.register(ProcessorTime())
    processes.install_guard()
    # Neither is a test of ours: an example takes long where other processes take the cores.
    slow = (hypothesis.HealthCheck.too_slow,)
    hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(config, items):
    """Marks the tests that start processes, and leaves them out of the quick tier."""
    for item in items:
        if processes.starts_processes(item):
            item.add_marker(processes.MARK)
    if config.getoption("--quick"):
        left_out = [item for item in items if item.get_closest_marker(processes.MARK)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker(processes.MARK)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Lets a test without the mark, or a fixture of it, fail that starts a process: the quick tier would run it."""
    processes.forbid_while(None if item.get_closest_marker(processes.MARK) else item.nodeid)
    try:
        return (yield)
    finally:
        processes.forbid_while(None)


@pytest.fixture(autouse=True)
def no_leaked_environment():
    """Fails a test that leaves an environment variable set, changed or removed."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    leaked = {
        name: (before.get(name), after.get(name))
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name) and name not in MAY_CHANGE
    }
    for name, (value, _) in leaked.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    assert not leaked, f"the test changed the environment; (before, after) were: {leaked}"


@pytest.fixture(autouse=True)
def no_leaked_threads():
    """Fails a test that leaves a thread which would keep the process from ending."""
    before = set(threading.enumerate())
    yield
    limit = time.monotonic() + 2  # one that is about to end may do so
    while (leaked := _staying(before)) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not leaked, f"the test left threads that are not daemons: {leaked}"


def _staying(before):
    return [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Fails a test in CI that is skipped for want of an MPI or of an environment: `bash tests/run` provides them."""
    report = yield
    if report.skipped and "CI" in os.environ and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if any(word in reason for word in ("MPI", "mpirun", "KDIST_TEST_")):
            report.outcome, report.longrepr = "failed", f"CI must not skip this. {reason}"
    return report
