"""TensorFlow's private attributes of datasets: what moved in the installed version is named."""

import tensorflow as tf

from kdist.data.graphs import dataset_internals
from kdist.data.graphs.dataset_internals import attributes, is_known, kind, missing_names


def test_the_installed_tensorflow_has_all_names():
    assert missing_names() == []


def test_what_another_tensorflow_lacks_is_named(monkeypatch):
    ops = dict(dataset_internals._OPS)
    ops["Batch"] = ops["Batch"]._replace(attributes=("batch_size", "moved"))
    ops["Renamed"] = ops["Take"]
    monkeypatch.setattr(dataset_internals, "_OPS", ops)
    monkeypatch.setattr(dataset_internals, "_NAMES", ("_inputs", "_gone"))
    assert missing_names() == ["Dataset._gone", "_BatchDataset._moved", "_RenamedDataset"]
    assert not is_known(tf.data.Dataset.range(4).batch(2))


def test_operations_and_their_attributes():
    dataset = tf.data.Dataset.range(4).batch(3, drop_remainder=True)
    assert (kind(dataset), is_known(dataset)) == ("Batch", True)
    assert int(attributes(dataset).batch_size) == 3
    assert not vars(attributes(dataset.enumerate().group_by_window(lambda i, _: i, lambda _, part: part, 2)))
