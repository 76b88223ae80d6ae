"""Tracebacks of failing ranks: the frames of the user, without those of kdist."""

import sys

import pytest

import kdist
from kdist.reports.traceback_text import traceback_text


def raised():
    try:
        try:
            kdist.AllReduce(compression="fp8")
        except ValueError as error:
            raise RuntimeError("a consequence") from error
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("word", [None, "short", "full"])
def test_frames_of_kdist_are_left_out(word):
    error = raised()
    text = traceback_text(type(error), error, error.__traceback__, {} if word is None else {"KDIST_TRACEBACK": word})
    assert ("options.py" in text) == (word == "full")
    assert text.count('kdist.AllReduce(compression="fp8")') == 1
    assert "direct cause" in text
    assert text.endswith("RuntimeError: a consequence\n")


def test_an_error_within_kdist_alone_keeps_its_frames():
    code = compile("raise ValueError('boom')", kdist.__file__, "exec")
    with pytest.raises(ValueError, match="boom") as found:
        exec(code)
    trace = found.value.__traceback__.tb_next
    assert kdist.__file__ in traceback_text(ValueError, found.value, trace, {})


@pytest.mark.parametrize("packages", ["site-packages", "dist-packages"])
def test_frames_of_keras_on_the_way_are_left_out(packages):
    names = {}
    for name, body in (("inner", "raise ValueError('boom')"), ("outer", "inner()")):
        file = f"/usr/lib/python3/{packages}/keras/src/{name}.py"
        exec(compile(f"def {name}():\n    {body}", file, "exec"), names)
    with pytest.raises(ValueError, match="boom") as found:
        names["outer"]()
    text = traceback_text(ValueError, found.value, found.value.__traceback__, {})
    assert "outer.py" not in text
    assert "inner.py" in text
    assert __file__ in text


def not_raised(words):
    return f"raise RuntimeError('boom') from {words}"


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("print('a'", "SyntaxError: "),
        ("if True:\nprint(1)", "IndentationError: "),
        (not_raised("ValueError('cause')"), "RuntimeError: boom"),
        (not_raised("ValueError"), "RuntimeError: boom"),
        ("error = RuntimeError('boom')\nerror.__context__ = OSError('context')\nraise error", "RuntimeError: boom"),
    ],
)
def test_an_error_without_a_traceback_or_with_such_a_cause_is_shown(code, last):
    with pytest.raises((SyntaxError, RuntimeError)) as found:
        exec(compile(code, "train.py", "exec"))
    error = found.value
    trace = error.__traceback__ if isinstance(error, RuntimeError) else None  # a rank leaves out its own frames
    text = traceback_text(type(error), error, trace, {})
    assert last in text.splitlines()[-1]
    assert 'File "train.py"' in text
    for chained in (error.__cause__, error.__context__):
        assert chained is None or repr(str(chained))[1:-1] in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has groups of errors from 3.11 on")
def test_members_of_a_group_without_a_traceback_are_shown():
    with pytest.raises(ExceptionGroup) as found:  # noqa: F821
        exec("raise ExceptionGroup('two', [ValueError('first'), TypeError('second')])")
    text = traceback_text(ExceptionGroup, found.value, found.value.__traceback__, {})  # noqa: F821
    for words in ("ExceptionGroup: two", "ValueError: first", "TypeError: second"):
        assert words in text


def test_a_traceback_that_cannot_be_shortened_is_whole(monkeypatch):
    monkeypatch.setattr("kdist.reports.traceback_text.is_kdists", None)
    error = raised()
    text = traceback_text(type(error), error, error.__traceback__, {})
    assert "options.py" in text
    assert text.endswith("RuntimeError: a consequence\n")
