"""Progress and first error of a build; the lines are from builds of Horovod."""

import pytest

from kdist.install.build_log import first_error, percent


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("  [ 50%] Building CXX object third_party/gloo/CMakeFiles/gloo.dir/types.cc.o\n", 50),
        ("[100%] Linking CXX shared library mpi_lib.so", 100),
        ("[  7%] Built target x", 7),
        ("  Created wheel for horovod: [50%]", None),
        ("", None),
    ],
)
def test_percent(line, expected):
    assert percent(line) == expected


@pytest.mark.parametrize(
    "error",
    [
        "/h/tensorflow/xla_mpi_ops.cc:27:10: fatal error: xla/client/xla_builder.h: No such file or directory",
        "/h/common/operations.cc:1042:12: error: 'foo' was not declared in this scope",
        "CMake Error at CMakeLists.txt:12 (project):",
        "operations.cc:(.text+0x1): undefined reference to `MPI_Init_thread'",
        "/usr/bin/ld: cannot find -lmpi: No such file or directory",
        "ModuleNotFoundError: No module named 'tensorflow'",
        "/venv/bin/python: No module named pip",
        "c++: fatal error: Killed signal terminated program cc1plus",
    ],
)
def test_the_first_error_is_returned(error):
    log = [
        "-- Performing Test HAS_-WERROR",
        "  warning: cc1plus: some error: is mentioned",
        f"  {error}\n",
        "  compilation terminated.\n",
        "  make[1]: *** [all] Error 2",
        "  subprocess.CalledProcessError: Command '['cmake']' returned non-zero exit status 2.",
        "  error: subprocess-exited-with-error",
    ]
    found = first_error(log, context=1).splitlines()
    assert [line.strip() for line in found] == [error, "compilation terminated."]


def test_errors_of_compilers_precede_those_of_cmake():
    log = ["CMake Error at CMakeTestCXXCompiler.cmake:71 (message):", "  x.cc:1:2: fatal error: no such thing"]
    assert first_error(log) == log[1]


def test_a_log_without_an_error_shows_its_end():
    assert first_error(["1", "2", "3"], context=1) == "2\n3"
