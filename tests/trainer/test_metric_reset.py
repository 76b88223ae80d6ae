"""A model's metrics are set back by one call of a graph, where Python of the user's has no part in it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.trainer.metric_reset import MetricReset

ROWS = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")


class Counting(keras.metrics.Metric):
    """Counts in a variable, by Keras' `reset_state`."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(shape=(2,), initializer="zeros", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add([1, 1])

    def result(self):
        return self.count[0]


class OwnReset(Counting):
    """Has state in Python."""

    resets = 0

    def reset_state(self):
        self.resets += 1
        super().reset_state()


def trained(*metrics):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=list(metrics))
    model.train_on_batch(ROWS, ROWS[:, :2])
    assert any(np.any(v) for v in model.metrics_variables)
    return model, MetricReset(model, model.reset_metrics)


def is_reset(model):
    return not any(np.any(v) for v in model.metrics_variables)


def number_of_traces(reset, monkeypatch):
    traces = []
    monkeypatch.setattr(reset, "_reset", lambda plain=reset._reset: (traces.append(tf.executing_eagerly()), plain())[1])
    return traces


def test_metrics_are_set_back_by_one_trace(monkeypatch):
    model, reset = trained("mae", keras.metrics.AUC(from_logits=True), Counting())
    runs = number_of_traces(reset, monkeypatch)
    for _ in range(3):
        model.test_on_batch(ROWS, ROWS[:, :2] > 0)
        reset()
        assert is_reset(model)
    assert runs == [False]


def test_metrics_of_another_compile_are_set_back(monkeypatch):
    model, reset = trained("mae")
    reset()
    model.compile("sgd", "mse", metrics=["mae", "mse"])
    model.train_on_batch(ROWS, ROWS[:, :2])
    reset()
    assert is_reset(model)


@pytest.mark.parametrize("metric", [OwnReset(), Counting()])
def test_python_of_the_users_runs_each_time(metric, monkeypatch):
    if type(metric) is Counting:
        calls = []
        plain = metric.reset_state
        metric.reset_state = lambda: (calls.append(1), plain())
        model, reset = trained(metric)
        before = len(calls)
        reset(), reset()
        assert len(calls) == before + 2
    else:
        model, reset = trained(metric)
        before = metric.resets
        reset(), reset()
        assert metric.resets == before + 2
    assert is_reset(model)


def test_eager_models_have_no_graph(monkeypatch):
    model, reset = trained("mae")
    model.run_eagerly = True
    runs = number_of_traces(reset, monkeypatch)
    reset(), reset()
    assert runs == [True, True]
    assert is_reset(model)
