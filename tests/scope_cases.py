"""What a scope of several ranks leaves behind, and what it refuses: cases for `test_scope.py`."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tensorflow_trainer

import kdist
from kdist import _strategy_scopes
from kdist._tf_internals import default_graphs
from kdist.errors import MismatchError, NotSynchronizedError, ScopeError, StrategyError
from kdist.reports.scope_marks import mark_crowd, own_scopes
from tests.helpers.logs import logged

METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def made() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def trained(model: keras.Model) -> keras.Model:
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    return model


def everything() -> dict[str, Any]:
    """Returns everything of Keras that a scope wraps while it is open."""
    wrapped = {name: getattr(keras.Model, name) for name in ("__init__", "train_step", "test_step", *METHODS)}
    wrapped["TFEpochIterator"] = tensorflow_trainer.TFEpochIterator
    wrapped["Mean"], wrapped["Sum"] = keras.metrics.Mean.update_state, keras.metrics.Sum.update_state
    wrapped["apply"] = keras.optimizers.Optimizer.apply
    wrapped["reset"] = default_graphs.reset
    return wrapped


def case_what_is_wrapped_is_put_back():
    before = everything()
    with kdist.scope() as strategy:
        assert strategy.num_replicas_in_sync == kdist.size()
        inside = trained(made())
        assert everything() != before
    assert everything() == before
    assert "_kdist" in inside.__dict__
    assert tf.distribute.get_strategy() is not strategy


def case_a_model_made_after_the_scope_is_keras_own():
    with kdist.scope():
        inside = trained(made())
    after = trained(made())
    assert not {"_kdist", *METHODS, "train_step", "test_step", "predict_step"} & after.__dict__.keys()
    assert after.distribute_strategy is not inside.distribute_strategy
    for name in METHODS:
        assert getattr(after, name).__func__ is getattr(keras.Model, name)
    trained(inside)  # it stays distributed


def case_what_is_wrapped_is_put_back_when_an_error_leaves_the_scope():
    before = everything()

    def script():
        with kdist.scope():
            model = made()
            model.compile("sgd", lambda y_true, y_pred: 1 / 0)
            trained(model)

    with pytest.raises(ZeroDivisionError):
        script()
    assert everything() == before


def case_a_nested_scope_is_refused():
    with kdist.scope():
        with pytest.raises(ScopeError, match="open already"):
            with kdist.scope():
                pass
        trained(made())


def case_scopes_may_follow_each_other_with_other_settings():
    with kdist.scope(scale_batch=False):
        first = trained(made())
    with kdist.scope(scale_lr=None):
        second = trained(made())
    assert first.__dict__["_kdist"].settings.scale_batch is False
    assert second.__dict__["_kdist"].settings.scale_batch is True


def case_single_is_independent_training():
    before = everything()
    with kdist.scope("single") as strategy:
        assert strategy.num_replicas_in_sync == 1
        model = made()
        assert "_kdist" not in model.__dict__
        if kdist.rank() == 0:  # nobody waits for the others, a callback's engine neither
            model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[kdist.callbacks.NaNPolicy()])
    assert everything() == before


def case_ranks_that_ask_for_different_scopes_are_refused():
    with pytest.raises(MismatchError, match="scale_lr"):
        with kdist.scope(scale_lr=1.0 + kdist.rank()):
            pass


def case_ranks_that_have_fewer_cores_than_they_are_say_so():
    with pytest.MonkeyPatch.context() as patch, logged(logging.DEBUG) as said:
        patch.setattr(_strategy_scopes._state, "strategy", None)  # as in the job's first scope
        patch.setattr(os, "sched_getaffinity", lambda pid: {0})
        with kdist.scope():
            pass
    assert any(f"rank {kdist.rank()}: {os.getpid()} on " in line for line in said), said
    told = [line for line in said if f"{kdist.size()} ranks share 1 core(s) of host" in line]
    assert len(told) == kdist.is_chief(), said


def case_the_same_is_not_said_again_after_kdist_run():
    with pytest.MonkeyPatch.context() as patch, logged() as said, tempfile.TemporaryDirectory() as directory:
        patch.setattr(_strategy_scopes._state, "strategy", None)
        patch.setattr(os, "sched_getaffinity", lambda pid: {0})
        patch.setattr(own_scopes, "directory", Path(directory))
        mark_crowd(directory)
        with kdist.scope():
            pass
    assert not any("core(s) of host" in line for line in said), said


def case_the_engine_object_is_the_word():
    with kdist.scope(kdist.AllReduce(engine="mpi")) as strategy:
        assert strategy.engine.name == "mpi"
        assert strategy.engine.size == kdist.size()


def case_clear_session_leaves_the_scope_open():
    """Each sweep over hyperparameters calls it, under one of its names, between two models and within one `fit`."""
    before = everything()
    with kdist.scope(scale_lr=None) as strategy:
        import tensorflow.compat.v1 as another_module  # as TensorBoard does

        assert another_module.reset_default_graph
        for clear in (keras.utils.clear_session, tf.keras.backend.clear_session, tf.compat.v1.reset_default_graph):
            model = trained(made())
            clear()
            assert tf.distribute.get_strategy() is strategy
            assert tf.distribute.has_strategy()
            assert keras.config.is_interactive_logging_enabled() == kdist.is_chief()
            trained(model)
            assert trained(made()).distribute_strategy is strategy
        with strategy.scope():
            keras.utils.clear_session()
            made()
        clearing = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: keras.utils.clear_session())
        made().fit(np.ones((4, 2)), np.ones((4, 1)), epochs=2, verbose=0, callbacks=[clearing])
        model = made()
        model.optimizer.build(model.trainable_variables)
        gradients = [tf.ones(v.shape) for v in model.trainable_variables]
        with pytest.raises(NotSynchronizedError, match="`apply`"):  # the guard is still there
            model.optimizer._backend_apply_gradients(gradients, model.trainable_variables)
    assert everything() == before
    assert not tf.distribute.has_strategy()

    def script():
        with kdist.scope():
            keras.utils.clear_session()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script()
    keras.utils.clear_session()
    assert not tf.distribute.has_strategy()
    assert trained(made()).distribute_strategy is not strategy


def case_a_strategy_of_one_process_is_refused_on_several():
    for made in (tf.distribute.OneDeviceStrategy("/cpu:0"), tf.distribute.MirroredStrategy(["/cpu:0"])):
        expected = rf"one process. Received: {type(made).__name__} and 2 process\(es\)"
        with pytest.raises(StrategyError, match=expected), kdist.scope(made):
            pass
    assert not tf.distribute.has_strategy()
