"""What follows from the reports of all ranks: the same on each, or some would wait for the others."""

import pytest

from kdist.data.input_checks import InputReport, refuse_order_by_cores, refuse_shared_caches
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


def test_an_order_by_the_number_of_cores_is_refused_where_that_differs():
    refuse_order_by_cores([report("here"), report("there")])
    refuse_order_by_cores([report("here")._replace(cores=2), report("there")._replace(cores=2)])
    with pytest.raises(DataError, match=r"2 core\(s\) on rank 0, 4 on rank 1"):
        refuse_order_by_cores([report("here")._replace(cores=2), report("there")._replace(cores=4)])
