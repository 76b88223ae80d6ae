"""What ranks conclude from what all of them told: the same on each, or some would wait for the others."""

import pytest

from kdist.errors import DataError
from kdist.training.input_checks import _refuse_shared_caches, _Told


def told(host, *files):
    return _Told(host, files, [], [])


def test_a_cache_that_ranks_of_any_host_would_write_together_is_refused_on_all():
    with pytest.raises(DataError, match="cache\\('/tmp/kept'\\)"):
        _refuse_shared_caches([told("here"), told("there", "/tmp/kept"), told("there", "/tmp/kept")])


def test_a_cache_has_one_writer_a_host():
    _refuse_shared_caches([told("here", "/tmp/kept"), told("there", "/tmp/kept", "/tmp/kept"), told("there", "/tmp/2")])
