"""Keras' own callbacks of which one rank's decision, or the chief's alone, is to be seen."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from tests.callbacks.cases_writers import compiled, train
from tests.training.behaviours import assert_equal_everywhere, weights_of
from tests.training.fidelity import BATCH, fresh, mlp, rows, size

STEPS = 6


def a_nan_that_one_rank_sees_ends_training_on_all() -> None:
    """TerminateOnNaN: the other ranks' losses, and all weights, stay finite."""

    class Marked(keras.layers.Layer):
        """Its loss is of this rank's rows; a compiled loss of the user's is of all rows."""

        def call(self, inputs: Any) -> Any:
            first = inputs[:, 0]
            self.add_loss(tf.reduce_mean(tf.where(first == 7.0, tf.cast(np.nan, first.dtype), tf.zeros_like(first))))
            return inputs

    generator = np.random.default_rng(7)
    n = STEPS * size() * BATCH
    good, y = generator.normal(size=(n, 5)), generator.normal(size=(n, 2))
    for rank, bad in ((0, 2), (size() - 1, 2), (size() - 1, STEPS - 1)):
        x, seen = good.copy(), []
        x[(bad * size() + rank) * BATCH] = 7.0
        fresh()
        with kdist.scope(scale_lr=None):
            model = keras.Sequential([keras.Input((5,)), Marked(), mlp()])
            model.compile("sgd", "mse")
            note = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs, seen=seen: seen.append([batch, bool(np.isnan(logs["loss"]))])
            )
            callbacks = [note, keras.callbacks.TerminateOnNaN()]
            history = model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
        assert seen == [[step, kdist.rank() == rank and step >= bad] for step in range(bad + 1)], seen
        assert assert_equal_everywhere(int(model.optimizer.iterations)) == bad + 1
        assert assert_equal_everywhere(history.epoch) == [0]
        assert np.isfinite(assert_equal_everywhere(weights_of(model))[0]).all()


@contextlib.contextmanager
def monitored() -> Iterator[tuple[str, list[Any]]]:
    """Serves on this rank's own address, and collects what is posted there."""
    received: list[Any] = []

    class Noted(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Noted) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "127.0.0.1")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


def the_chief_alone_tells_a_monitor() -> None:
    """RemoteMonitor, and a subclass of the user's own, which evaluates on all ranks."""

    class Evaluates(keras.callbacks.RemoteMonitor):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            x, y = rows("ragged")
            again = self.model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
            super().on_epoch_end(epoch, {"again": assert_equal_everywhere(again["loss"])})

    fresh()
    with monitored() as (root, received):
        with kdist.scope(scale_lr=None):
            theirs = keras.callbacks.RemoteMonitor(root, send_as_json=True)
            callbacks = [theirs, Evaluates(root, send_as_json=True)]
            history = train(compiled(), callbacks, epochs=2).history
        assert theirs.root == callbacks[1].root == root
    if kdist.is_chief():
        assert [each["epoch"] for each in received] == [0, 0, 1, 1]
        for epoch in range(2):
            assert received[2 * epoch] == {"epoch": epoch, **{name: found[epoch] for name, found in history.items()}}
            assert set(received[2 * epoch + 1]) == {"epoch", "again"}
    else:
        assert received == []


def the_chief_alone_shows_progress() -> None:
    """ProgbarLogger, Keras' own one or one that was given, and those of `evaluate` and `predict`."""
    x, y = rows("even")
    fresh()
    with kdist.scope(scale_lr=None):
        model = compiled()
        keras.config.enable_interactive_logging()  # which the scope turns off elsewhere, and a user may turn on again
        for verbose in (1, 2):
            for given in ([], [keras.callbacks.ProgbarLogger()]):
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    train(model, given, epochs=2, verbose=verbose)
                assert said.getvalue().count("Epoch 2/2") == kdist.is_chief(), said.getvalue()
        for method, data in ((model.evaluate, (x, y)), (model.predict, (x,))):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                method(*data, batch_size=BATCH, verbose=1)
            assert bool(said.getvalue()) == kdist.is_chief(), said.getvalue()
        if not kdist.is_chief():
            keras.config.disable_interactive_logging()


CASES = {
    function.__name__: function
    for function in (
        a_nan_that_one_rank_sees_ends_training_on_all,
        the_chief_alone_tells_a_monitor,
        the_chief_alone_shows_progress,
    )
}
