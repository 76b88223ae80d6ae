"""The level of kdist's log, and what it says once."""

import contextlib
import logging
import sys
import warnings

import pytest

import kdist
from kdist.cluster.info import ClusterInfo
from kdist.reports.log import OnceLog, show_log, warnings_at_users_lines
from tests.helpers import spmd


@contextlib.contextmanager
def unconfigured():
    """Yields kdist's logger as in a process that has configured nothing: pytest has handlers of its own."""
    kdist, root = logging.getLogger("kdist"), logging.getLogger()
    before, handlers, level, propagate = root.handlers[:], kdist.handlers[:], kdist.level, kdist.propagate
    root.handlers[:] = kdist.handlers[:] = []
    kdist.setLevel(logging.NOTSET)
    try:
        yield kdist
    finally:
        root.handlers[:], kdist.handlers[:] = before, handlers
        kdist.setLevel(level)
        kdist.propagate = propagate


CHIEF = ClusterInfo(size=2)


@pytest.mark.parametrize(("word", "shown"), [("", "info warning"), ("warning", "warning"), ("error", "")])
@pytest.mark.parametrize("by", ["variable", "logging"])
def test_the_level(word, shown, by, monkeypatch, capsys):
    monkeypatch.setenv("KDIST_LOG", word if by == "variable" else "")
    with unconfigured() as log:
        if word and by == "logging":
            log.setLevel(word.upper())
        show_log(CHIEF)
        log.info("info")
        log.warning("warning")
    assert capsys.readouterr().err.split() == [part for each in shown.split() for part in ("[kdist]", each)]


def test_an_unknown_level_is_told(monkeypatch, capsys):
    monkeypatch.setenv("KDIST_LOG", "loud")
    with unconfigured():
        show_log(CHIEF)
    said = capsys.readouterr().err
    assert "Received: KDIST_LOG='loud'. Expected one of debug, info, warning, error. Fix: set one of these" in said


@pytest.mark.parametrize("of", ["kdist", ""])
def test_the_level_counts_with_a_handler_of_the_users(of, monkeypatch):
    monkeypatch.setenv("KDIST_LOG", "warning")
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    with unconfigured() as log:
        logging.getLogger(of).addHandler(handler)
        log.setLevel("INFO")
        show_log(CHIEF)
        log.info("info")
        log.warning("warning")
        assert log.handlers == [handler] * bool(of)
    assert said == ["warning"]


def test_the_same_text_is_said_once(caplog):
    once = OnceLog()
    with caplog.at_level(logging.INFO, "kdist"):
        for text in ("a", "b", "a"):
            once.info(text)
        once.clear()
        once.info("a")
    assert [record.getMessage() for record in caplog.records] == ["a", "b", "a"]


def test_warnings_show_the_users_line(capsys):
    before = warnings.formatwarning
    code = compile("warnings.warn('of whoever called', stacklevel=1)", kdist.__file__, "exec")
    with warnings.catch_warnings(), warnings_at_users_lines():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *of: print(warnings.formatwarning(*of[:4]))
        exec(code, {"warnings": warnings})
        warnings.warn("mine", stacklevel=1)
    assert warnings.formatwarning is before
    caller, mine = (line for line in capsys.readouterr().out.splitlines() if "UserWarning" in line)
    assert caller.startswith(f"{__file__}:")
    assert mine.startswith(f"{__file__}:")


@pytest.mark.parametrize(("level", "is_shown"), [("debug", True), ("error", False), (None, False)])
def test_the_variable_has_its_effect_in_one_process(level, is_shown):
    script = "import logging, kdist\nwith kdist.scope(): logging.getLogger('kdist').debug('a detail')"
    env = {} if level is None else {"KDIST_LOG": level}
    done = spmd.execute([sys.executable, "-c", script], env=env, timeout=90)
    assert done.returncode == 0, done.output
    assert ("[kdist] a detail" in done.output) == is_shown
