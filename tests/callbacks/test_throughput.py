"""Which rank is slow, and why; what is printed."""

import gc
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.callbacks.throughput import COLLECTIVES, Throughput, Times, diagnose, table
from kdist.engines.single import SingleEngine


def times(seconds=10.0, input=0.5, waiting=0.5):
    return Times(640, seconds, input, waiting)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([times(waiting=4.0), times(input=4.0)], (1, "input-bound")),
        ([times(), times(waiting=4.0), times(waiting=4.2)], (0, "slow compute")),
        # Both late and hungry: the larger part is named.
        ([times(waiting=5.0), times(input=2.0)], (1, "slow compute")),
        ([times(waiting=5.0), times(input=4.0)], (1, "input-bound")),
        ([times(waiting=4.0), times(waiting=4.1)], (0, "slow link")),
        ([times(waiting=1.0), times(waiting=1.9)], None),
        ([times(waiting=1.0), times(waiting=2.1)], (0, "slow compute")),
        ([times(waiting=9.0)], None),
        ([times(0.0, 0.0, 0.0)] * 2, None),
    ],
)
def test_the_slowest_rank_is_named(ranks, said):
    assert diagnose(ranks) == said


def test_the_shares_sum_to_one():
    assert times(10.0, 2.0, 3.0).shares() == {"input": 0.2, "compute": 0.5, "waiting": 0.3}
    assert set(times(0.0, 0.0, 0.0).shares().values()) == {0.0}


def test_the_table():
    ranks = [times(input=0.2, waiting=4.0), times(input=4.5, waiting=0.1)]
    assert table(ranks, 3, (1, "input-bound")).splitlines() == [
        "Throughput: 128 samples/s over 2 rank(s), 3 epoch(s)",
        "rank   input  compute  waiting",
        "   0    2.0%    58.0%    40.0%",
        "   1   45.0%    54.0%     1.0%  slowest: input-bound",
    ]


def test_the_bar_has_one_key_and_a_file_all(tmp_path, capsys):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    log = tmp_path / "log.csv"
    callbacks = [Throughput(), keras.callbacks.CSVLogger(log)]
    history = model.fit(np.ones((32, 3)), np.ones((32, 1)), epochs=2, callbacks=callbacks).history
    shares = {"input_rank_0", "compute_rank_0", "waiting_rank_0"}
    assert set(history) == {"loss", "samples_per_second", *shares}
    assert set(log.read_text().splitlines()[0].split(",")) >= {"epoch", *history}
    bar, _, _ = capsys.readouterr().out.partition("Throughput")
    assert set(re.findall(r" (\w+): ", bar)) == {"loss", "samples_per_second"}


class Untimed(SingleEngine):
    """Sends like Horovod: no time is known, and some collectives are made of others."""

    seconds = None

    def alltoall(self, tensors):
        return [tf.numpy_function(self._wait, [each], each.dtype) for each in tensors]

    allreduce = allgather = broadcast = alltoall

    def alltoallv(self, tensors, counts):
        return self.alltoall(tensors), counts

    def reduce_scatter(self, tensors):
        return self.alltoall(tensors)

    def _wait(self, sent):
        time.sleep(0.05)
        return sent


@pytest.mark.parametrize("name", COLLECTIVES)
def test_time_in_every_collective_is_waiting(name):
    class Sends(keras.Model):
        def call(self, x):
            return x

        def train_step(self, data):
            arguments = [[1]] if name == "alltoallv" else []
            received = getattr(engine, name)([data], *arguments)
            return {"sent": tf.reduce_sum(tf.nest.flatten(received)[0])}

    engine, model = Untimed(), Sends()
    model.compile()
    history = model.fit(np.ones((8, 1)), batch_size=1, verbose=0, callbacks=[Throughput(engine=engine)]).history
    assert history["waiting_rank_0"][0] > 0.5
    shares = [history[f"{part}_rank_0"][0] for part in ("input", "compute", "waiting")]
    assert sum(shares) == pytest.approx(1)


def callbacks_that_see_lists():
    gc.collect()
    hook = getattr(keras.callbacks.CallbackList.set_model, "hook", None)
    return 0 if hook is None else len(list(hook.functions))


def test_a_list_without_it_has_keras_own_bar():
    before = callbacks_that_see_lists()
    kept = Throughput()
    assert callbacks_that_see_lists() == before + 1
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    listed = keras.callbacks.CallbackList([], add_progbar=True, model=model)
    assert [type(each) for each in listed.callbacks] == [keras.callbacks.ProgbarLogger]
    listed = keras.callbacks.CallbackList([kept], add_progbar=True, model=model)
    assert isinstance(listed.callbacks[-1], keras.callbacks.ProgbarLogger)
    assert type(listed.callbacks[-1]) is not keras.callbacks.ProgbarLogger
    del kept, listed
    assert callbacks_that_see_lists() == before
