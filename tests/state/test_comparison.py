"""What is said of weights that differ between the ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.engines.single import SingleEngine
from kdist.errors import NotSynchronizedError
from kdist.state import comparison


@pytest.mark.parametrize("gpus", [[], ["GPU:0"]])
def test_where_there_are_gpus_the_error_names_sparse_gradients(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "gathered_checksums", lambda engine, variables: np.array([[1], [2]]))
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    with pytest.raises(NotSynchronizedError, match="'table' differs between the ranks") as raised:
        comparison.check_equal(SingleEngine(), {"table": keras.Variable(0.0)})
    assert ("sparse_as_dense=True" in str(raised.value)) == bool(gpus)
