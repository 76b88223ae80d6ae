"""The evaluator beside a chief, over a real connection: the files that it evaluates, its logs, and how it ends."""

import contextlib
import os
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.errors import ClusterLostError, ScopeError
from kdist.launchers.hosts.ports import free_ports
from kdist.parameter_server.evaluator import Evaluator, checkpoint_pattern, newest
from kdist.parameter_server.membership import Membership
from kdist.strategies.options import ParameterServer

LIMIT = 60.0  # seconds; a generous guard
X = np.random.default_rng(0).normal(size=(50, 3)).astype("float32")
Y = (X.sum(1) > 0).astype("int64")
WEIGHTS = np.linspace(0.1, 2.0, 50).astype("float32")


class Classifier(keras.Model):
    """A model that is not built before it sees data."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


def classifier():
    model = Classifier()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"])
    return model


@pytest.fixture
def chief():
    """The chief's end of the connection, and the cluster."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = {job: [address] for job, address in zip(("chief", "worker", "ps"), addresses, strict=True)}
    membership = Membership(cluster, LIMIT)
    yield membership, cluster
    membership.close(success=True)


@contextlib.contextmanager
def meanwhile(act):
    """Does something in a thread; waits for its end."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield
    thread.join(LIMIT)
    assert not thread.is_alive()


@pytest.mark.timeout(2 * LIMIT)
def test_each_new_checkpoint_is_evaluated_as_fit_would_validate(chief, tmp_path, caplog):
    membership, cluster = chief
    trained = classifier()
    written, expected = [], []
    for epoch in (1, 2):
        trained.fit(X, Y, epochs=epoch, verbose=0)
        written.append((tmp_path / f"{epoch}.keras", tmp_path / "seen" / f"at [{epoch:02d}].keras"))
        trained.save(written[-1][0])
        # The last batch is ragged, and 2 batches of 16 are all that count.
        expected.append(trained.evaluate(X[:32], Y[:32], sample_weight=WEIGHTS[:32], verbose=0, return_dict=True))
    (tmp_path / "seen").mkdir()

    def evaluated():
        return [record.getMessage() for record in caplog.records if record.getMessage().startswith("evaluated ")]

    def chief_saves():
        deadline = time.monotonic() + LIMIT
        for count, (source, target) in enumerate(written):
            while len(evaluated()) < count and time.monotonic() < deadline:
                time.sleep(0.05)
            os.replace(source, target)
        membership.close(success=True)  # and at once: the last one is evaluated all the same

    caplog.set_level("INFO", logger="kdist")
    options = ParameterServer(timeout=LIMIT)
    with Evaluator(cluster, 0, options).scope(options), meanwhile(chief_saves):
        model = classifier()
        callbacks = [
            keras.callbacks.ModelCheckpoint(tmp_path / "seen" / "at [{epoch:02d}].keras"),
            keras.callbacks.TensorBoard(tmp_path / "board"),
            keras.callbacks.EarlyStopping("val_loss"),
        ]
        with pytest.raises(SystemExit) as ended:
            model.fit(
                X, Y, batch_size=16, validation_data=(X, Y, WEIGHTS), validation_steps=2, epochs=9, callbacks=callbacks
            )
    assert ended.value.code == 0
    assert int(model.optimizer.iterations) == int(trained.optimizer.iterations)
    lines = evaluated()
    assert len(lines) == 2
    for line, (_, path), logs in zip(lines, written, expected, strict=True):
        numbers = dict(part.split(" ") for part in line.removeprefix(f"evaluated {path}: ").split(", "))
        assert numbers.keys() == logs.keys()
        np.testing.assert_allclose([float(numbers[name]) for name in logs], list(logs.values()), rtol=1e-4)
    assert expected[0]["loss"] != expected[1]["loss"]
    [board] = (tmp_path / "board" / "validation").iterdir()
    tags = [value.tag for event in tf.compat.v1.train.summary_iterator(str(board)) for value in event.summary.value]
    assert tags.count("evaluation_loss_vs_iterations") == 2


def fit(model, tmp_path, **kwargs):
    given = {"validation_data": (X, Y), "callbacks": [keras.callbacks.BackupAndRestore(tmp_path)]}
    model.fit(X, Y, verbose=0, **given | kwargs)


@pytest.mark.timeout(2 * LIMIT)
def test_an_evaluator_fails_with_the_chief(chief, tmp_path):
    membership, cluster = chief
    options = ParameterServer(timeout=LIMIT)
    with Evaluator(cluster, 0, options).scope(options), meanwhile(lambda: membership.close(success=False)):
        with pytest.raises(ClusterLostError):
            fit(classifier(), tmp_path)


@pytest.mark.timeout(2 * LIMIT)
def test_what_cannot_be_evaluated_is_refused_and_a_missing_checkpoint_is_logged(chief, tmp_path, caplog):
    membership, cluster = chief
    options = ParameterServer(timeout=LIMIT)
    with Evaluator(cluster, 0, options).scope(options):
        model = classifier()
        assert model.predict(X[:1], verbose=0).shape == (1, 2)  # all else is Keras' own
        for wrong, said in [
            (lambda: fit(model, tmp_path, validation_data=None), r"\.fit with the callbacks \['BackupAndRestore'\]"),
            (lambda: fit(model, tmp_path, callbacks=None), r"\.fit with validation_data and the callbacks \[\]"),
            (lambda: model.train_on_batch(X, Y), r"\.train_on_batch with"),
        ]:
            with pytest.raises(ScopeError, match=said):
                wrong()
    membership.close(success=True)
    with pytest.raises(SystemExit) as ended:  # a model that was made in the scope stays so
        fit(model, tmp_path)
    assert ended.value.code == 0
    assert f"no checkpoint at {tmp_path}" in caplog.text
    assert "BackupAndRestore, which deletes its file" in caplog.text


def test_the_newest_file_of_a_name_is_found(tmp_path):
    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / "{{a}}[{epoch:02d}] {loss:.2f}.weights.h5", save_weights_only=True
    )
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    pattern = checkpoint_pattern([keras.callbacks.EarlyStopping(), backup, checkpoint])
    assert newest(pattern) is None
    for age, name in enumerate(["{a}[02] 0.50.weights.h5", "{a}[10] 0.40.weights.h5", "another.weights.h5"]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))
    first = newest(pattern)
    assert first[-1] == str(tmp_path / "{a}[10] 0.40.weights.h5")
    (tmp_path / "new").touch()
    os.replace(tmp_path / "new", first[-1])
    assert newest(pattern) != first
    assert checkpoint_pattern([backup]) == str(tmp_path / "backup" / "latest.weights.h5")
    assert checkpoint_pattern([keras.callbacks.EarlyStopping()]) is None
