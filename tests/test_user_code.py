"""Which line of a stack is the user's."""

import functools
import sys
from pathlib import Path

from kdist._user_code import is_kdists, is_users, user_line, user_place


def test_the_innermost_frame_outside_of_libraries():
    line = sys._getframe().f_lineno + 1
    assert functools.reduce(lambda *_: user_line(), [0, 1]) == f"{Path(__file__).name}:{line}"
    assert user_place() == (__file__, line + 1)


def test_whose_a_file_is():
    import numpy

    import kdist.callbacks

    for file in (functools.__file__, numpy.__file__, "<frozen runpy>", "/tmp/__autograph_generated_file0.py"):
        assert not is_users(file)
        assert not is_kdists(file)
    assert is_kdists(kdist.callbacks.__file__)
    assert not is_users(kdist.callbacks.__file__)
    assert is_users("/home/me/kdist_experiments/train.py")
