"""What follows from the reports of all ranks: the same on each, or some would wait for the others."""

import pytest

from kdist.data.input_checks import InputReport, refuse_shared_caches
from kdist.errors import DataError


def report(host, *cache_files):
    return InputReport(host, cache_files, [], [], None)


def test_a_cache_that_ranks_of_any_host_would_write_together_is_refused_on_all():
    with pytest.raises(DataError, match="cache\\('/tmp/kept'\\)"):
        refuse_shared_caches([report("here"), report("there", "/tmp/kept"), report("there", "/tmp/kept")])


def test_a_cache_has_one_writer_a_host():
    refuse_shared_caches(
        [report("here", "/tmp/kept"), report("there", "/tmp/kept", "/tmp/kept"), report("there", "/tmp/2")]
    )
