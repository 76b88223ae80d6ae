"""Tracebacks of failing ranks: the frames of the user, without those of kdist."""

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
