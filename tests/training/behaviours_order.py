"""Each sample is seen exactly once an epoch, on any number of ranks, whatever shuffles and whoever forgot the seed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from tests.helpers.logs import logged
from tests.training.behaviours import Recorder, SeenOfEachEpoch, everyone

ROWS, BATCH, EPOCHS = 27, 4, 3  # 7 batches, the last of 3 rows: on 2 ranks and on 3, one is idle in the last step
NUM_BATCHES = -(-ROWS // BATCH)

IDS = np.arange(ROWS, dtype="float32")[:, None]
PAIRS = (IDS, IDS)


def pairs() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(PAIRS)


class ShufflesItself(keras.utils.PyDataset):
    """Shuffles as the guides do: with NumPy, at the end of each epoch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.order = np.random.permutation(ROWS)

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> Any:
        rows = IDS[self.order[index * BATCH : (index + 1) * BATCH]]
        return rows, rows

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


class InOrder(ShufflesItself):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.order = np.arange(ROWS)

    def on_epoch_end(self) -> None:
        pass


def endless_shuffled() -> Iterator[Any]:
    while True:
        order = np.random.permutation(ROWS)
        for start in range(0, ROWS, BATCH):
            rows = IDS[order[start : start + BATCH]]
            yield rows, rows


INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {"x": IDS, "y": IDS, "batch_size": BATCH},
    "arrays_in_batches": lambda: {"x": IDS, "y": IDS, "batch_size": BATCH, "shuffle": "batch"},
    "arrays_and_steps": lambda: {"x": IDS, "y": IDS, "batch_size": BATCH, "steps_per_epoch": NUM_BATCHES},
    "tf_data": lambda: {"x": pairs().shuffle(ROWS).batch(BATCH)},
    "tf_data_short_buffer": lambda: {"x": pairs().shuffle(5).batch(BATCH)},
    "tf_data_batches": lambda: {"x": pairs().shuffle(ROWS).batch(BATCH).shuffle(3).prefetch(2)},
    "tf_data_mapped": lambda: {
        "x": pairs().shuffle(ROWS).map(lambda x, y: (x, y)).batch(BATCH).map(lambda x, y: (x, y))
    },
    "tf_data_repeated": lambda: {
        "x": pairs().shuffle(ROWS).batch(BATCH).repeat(),
        "steps_per_epoch": NUM_BATCHES,
    },
    "tf_data_filtered": lambda: {
        "x": pairs().shuffle(ROWS).filter(lambda *_: True).map(lambda x, y: (x, y)).batch(BATCH).repeat(),
        "steps_per_epoch": NUM_BATCHES,
    },
    "tf_data_interleaved": lambda: {
        "x": tf.data.Dataset.range(9)
        .shuffle(9)
        .interleave(lambda part: pairs().shard(9, part).shuffle(3), num_parallel_calls=tf.data.AUTOTUNE)
        .batch(BATCH)
    },
    "py_dataset": lambda: {"x": InOrder(), "shuffle": True},
    "py_dataset_workers": lambda: {"x": InOrder(workers=2), "shuffle": True},
    "py_dataset_shuffles_itself": lambda: {"x": ShufflesItself(), "shuffle": False},
    "py_dataset_shuffles_itself_with_workers": lambda: {"x": ShufflesItself(workers=2), "shuffle": False},
    "py_dataset_shuffled_twice": lambda: {"x": ShufflesItself(workers=2), "shuffle": True},
    "generator": lambda: {"x": endless_shuffled(), "steps_per_epoch": NUM_BATCHES},
}

FIXED_EVERY_EPOCH = {"tf_data_once": lambda: {"x": pairs().shuffle(ROWS, reshuffle_each_iteration=False).batch(BATCH)}}


def seen_by_all(arguments: dict[str, Any], epochs: int = EPOCHS) -> list[list[list[list[int]]]]:
    """Trains, and returns `[epoch][rank][step]`, the rows that counted."""
    callback = SeenOfEachEpoch()
    with kdist.scope(scale_lr=None):
        model = Recorder()
        model.fit(**arguments, epochs=epochs, verbose=0, callbacks=[callback])
    return [list(ranks) for ranks in zip(*everyone(callback.epochs), strict=True)]


def flat(ranks: list[list[list[int]]]) -> list[int]:
    """Returns the rows of an epoch in the order of steps, then ranks."""
    by_step = itertools.zip_longest(*ranks, fillvalue=[])
    return [row for step in by_step for rows in step for row in rows]


def once_an_epoch(name: str) -> Callable[[], None]:
    def case() -> None:
        epochs = seen_by_all({**INPUTS, **FIXED_EVERY_EPOCH}[name]())
        assert len(epochs) == EPOCHS
        orders = [flat(ranks) for ranks in epochs]
        for order in orders:
            assert sorted(order) == list(range(ROWS)), order
            assert order != list(range(ROWS))
        if name in INPUTS:
            assert orders[0] != orders[1] != orders[2], "the order must change between epochs"
        else:
            assert orders[0] == orders[1] == orders[2]

    return case


ORDERS = {name: once_an_epoch(name) for name in [*INPUTS, *FIXED_EVERY_EPOCH]}


def in_order_without_shuffle() -> None:
    """Unshuffled arrays come as one process would see them: step by step, rank after rank."""
    for arguments in (
        {"x": IDS, "y": IDS, "batch_size": BATCH, "shuffle": False},
        {"x": pairs().batch(BATCH)},
        {"x": InOrder(workers=2), "shuffle": False},
    ):
        assert flat(seen_by_all(arguments, epochs=1)[0]) == list(range(ROWS))


def one_seed_one_order() -> None:
    """`set_random_seed` makes two runs alike."""
    found = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        found.append(seen_by_all(INPUTS["arrays"]()))
    assert found[0] == found[1]


def twice_in_a_row() -> None:
    """A second `fit` draws other orders, and validation in between costs nothing."""
    callback = SeenOfEachEpoch()
    with kdist.scope(scale_lr=None):
        model = Recorder()
        for _ in range(2):
            model.fit(IDS, IDS, batch_size=BATCH, verbose=0, callbacks=[callback])
            model.evaluate(IDS, IDS, batch_size=BATCH, verbose=0)
            assert sorted(flat(everyone(model.take_seen()))) == list(range(ROWS))
    first, second = (flat(list(ranks)) for ranks in zip(*everyone(callback.epochs), strict=True))
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second


# Streams that each rank brings itself.


def own_rows(rank: int, size: int) -> np.ndarray:
    """Returns the rows that a user's own sharding gives to a rank: one rank gets a few only."""
    mine = IDS[rank::size]
    return mine[:3] if rank == 1 else mine


def streams(kind: str, mine: np.ndarray, workers: int = 2) -> dict[str, Any]:
    if kind == "arrays":
        return {"x": mine, "y": mine, "batch_size": BATCH, "shuffle": True}
    dataset = tf.data.Dataset.from_tensor_slices((mine, mine)).batch(BATCH)
    if kind == "tf_data":
        return {"x": dataset.shuffle(3)}
    if kind == "tf_data_unknown":
        return {"x": dataset.filter(lambda *_: True)}

    class Own(keras.utils.PyDataset):
        def __len__(self) -> int:
            return -(-len(mine) // BATCH)

        def __getitem__(self, index: int) -> Any:
            rows = mine[index * BATCH : (index + 1) * BATCH]
            return rows, rows

    return {"x": Own(workers=workers)}


class FitsTwice(Recorder):
    """As where a model is pretrained: each training has data of its own kind, and validation data."""

    def fit(self, *trainings: dict[str, Any]) -> Any:
        return [super(FitsTwice, self).fit(**each, verbose=0) for each in trainings]


def a_fit_that_fits_twice() -> None:
    """The second training's data is no validation data of the first."""
    unknown = pairs().batch(BATCH).filter(lambda *_: True)
    validated = {"validation_data": PAIRS, "validation_batch_size": BATCH}
    second = {"x": IDS, "y": IDS, "batch_size": BATCH, "epochs": 2, **validated}
    with kdist.scope(scale_lr=None):
        model = FitsTwice()
        model.fit({"x": unknown, **validated}, second)
    assert sorted(flat(everyone(model.take_seen()))) == sorted(list(range(ROWS)) * 6)
    steps = -(-NUM_BATCHES // kdist.size())
    assert int(model.optimizer.iterations) in (3 * steps, 3 * steps + 1)  # the end of unknown data may count


def orders_of_before_the_scope_are_told_of() -> None:
    """Each rank made its batches with another shuffle: what it is given is not what the others are given."""
    for seed, told in ((kdist.rank(), [True]), (0, [])):
        order = np.random.default_rng(seed).permutation(ROWS)
        dataset = InOrder()
        dataset.order = order
        batches = ((IDS[order[i : i + BATCH]],) * 2 for i in itertools.cycle(range(0, ROWS, BATCH)))
        for arguments in ({"x": dataset}, {"x": batches, "steps_per_epoch": 2}):
            with logged() as lines, kdist.scope(scale_lr=None):
                Recorder().fit(**arguments, shuffle=False, verbose=0)
            said = [line for line in lines if "other targets" in line]
            assert [f"rank(s) {list(range(1, kdist.size()))}" in each for each in said] == (
                told if kdist.is_chief() else []
            ), said


def own_streams_of_unequal_lengths() -> None:
    rank, size = kdist.rank(), kdist.size()
    mine = own_rows(rank, size)
    expected = sorted(int(row) for r in range(size) for row in np.ravel(own_rows(r, size)))
    for kind in ("arrays", "tf_data", "tf_data_unknown", "py_dataset"):
        callback = SeenOfEachEpoch()
        with kdist.scope(scale_lr=None, auto_shard=False):
            model = Recorder()
            model.fit(**streams(kind, mine), epochs=2, verbose=0, callbacks=[callback])
            for ranks in zip(*everyone(callback.epochs), strict=True):
                assert sorted(flat(list(ranks))) == expected, kind
            assert sorted(np.ravel(sum(callback.epochs[0], []))) == sorted(np.ravel(mine)), kind
            arguments = streams(kind, mine)
            arguments.pop("shuffle", None)
            loss = model.evaluate(**arguments, verbose=0)
            assert sorted(flat(everyone(model.take_seen()))) == expected, kind
            assert len(set(everyone(loss))) == 1
            plain = float(
                np.mean((model.predict_on_batch(np.array(expected)[:, None]) - np.array(expected)[:, None]) ** 2)
            )
            np.testing.assert_allclose(loss, plain, rtol=1e-4)


def own_streams_of_known_lengths() -> None:
    """A pass has as many steps as the longest has batches; `steps_per_epoch` may be less than a pass, or all of it."""
    rank, size = kdist.rank(), kdist.size()
    mine = own_rows(rank, size)
    num_steps = max(-(-len(own_rows(r, size)) // BATCH) for r in range(size))
    half = np.arange(100 * rank, 100 * rank + 4 * BATCH, dtype="float32")[:, None]
    for kind, workers in (("arrays", 0), ("tf_data", 0), ("py_dataset", 0), ("py_dataset", 2)):
        with kdist.scope(scale_lr=None, auto_shard=False):
            model = Recorder()
            model.fit(**streams(kind, mine, workers), epochs=2, verbose=0)
            assert int(model.optimizer.iterations) == 2 * num_steps, kind
            model.take_seen()
            callback = SeenOfEachEpoch()
            model.fit(
                **streams(kind, mine, workers),
                steps_per_epoch=num_steps * size,
                epochs=3,
                verbose=0,
                callbacks=[callback],
            )
            for epoch in callback.epochs:
                assert sorted(np.ravel(sum(epoch, []))) == sorted(np.ravel(mine)), kind
            callback = SeenOfEachEpoch()
            given = {**streams(kind, half, workers), "shuffle": True}
            model.fit(**given, steps_per_epoch=2 * size, epochs=4, verbose=0, callbacks=[callback])
            for first in (0, 2):
                seen = sum(callback.epochs[first] + callback.epochs[first + 1], [])
                assert sorted(np.ravel(seen)) == sorted(np.ravel(half)), kind


def an_own_stream_may_be_empty() -> None:
    """A rank whose own dataset is empty, or turns out to be, takes part with rows that do not count."""
    rank, size = kdist.rank(), kdist.size()
    mine = IDS[rank::size]
    dataset = tf.data.Dataset.from_tensor_slices((mine, mine)).filter(lambda x, y: rank != 1).batch(BATCH)
    known = tf.data.Dataset.from_tensor_slices((mine, mine)).take(0 if rank == 1 else -1).batch(BATCH)
    expected = sorted(int(row) for r in range(size) if r != 1 for row in np.ravel(IDS[r::size]))
    for own in (dataset, known):
        callback = SeenOfEachEpoch()
        with kdist.scope(scale_lr=None, auto_shard=False):
            model = Recorder()
            model.fit(own, epochs=2, verbose=0, callbacks=[callback])
            model.evaluate(own, verbose=0)
            predicted = model.predict(own.map(lambda x, y: x), verbose=0)
        for ranks in zip(*everyone(callback.epochs), strict=True):
            assert sorted(flat(list(ranks))) == expected
        assert len(predicted) == len(expected)
    ragged = dataset.map(lambda x, y: (tf.ensure_shape(tf.repeat(x, 1 + tf.shape(x)[0] // BATCH, 1), (None, None)), y))
    with kdist.scope(scale_lr=None, auto_shard=False):
        model = keras.Sequential([keras.layers.Lambda(lambda x: x[:, :1]), keras.layers.Rescaling(1.0)])
        model.compile(loss="mse")
        model.evaluate(ragged, verbose=0)


def predictions_of_own_streams_come_step_by_step() -> None:
    """With `auto_shard=False`, `predict` returns, on every rank, all ranks' rows: step by step, rank after rank."""
    rank, size = kdist.rank(), kdist.size()
    shares = [own_rows(r, size) for r in range(size)]
    steps = itertools.zip_longest(*([s[i : i + BATCH] for i in range(0, len(s), BATCH)] for s in shares), fillvalue=[])
    expected = [float(row) for step in steps for rows in step for row in np.ravel(rows)]
    with kdist.scope(scale_lr=None, auto_shard=False):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(1.0)])
        dataset = tf.data.Dataset.from_tensor_slices(shares[rank]).batch(BATCH)
        predicted = model.predict(dataset, verbose=0)
        assert np.ravel(predicted).tolist() == expected
        assert np.ravel(model.predict(shares[rank], batch_size=BATCH, verbose=0)).tolist() == expected


def own_streams_and_several_steps_an_execution() -> None:
    """Their end may come at any step of an execution: in the first one too. Other data is still taken by several."""
    rank, size = kdist.rank(), kdist.size()
    shares = [own_rows(r, size) for r in range(size)]
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    own = tf.data.Dataset.from_tensor_slices(shares[rank]).batch(BATCH).with_options(options)
    everything = np.concatenate(shares)
    beginning = np.concatenate([share[:BATCH] for share in shares])
    ends: list[int] = []
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))]
    with kdist.scope(scale_lr=None):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), lambda y, p: p, steps_per_execution=3)
        for data, rows in ((own.take(1), beginning), (own, everything)):
            predicted = model.predict(data, verbose=0)
            assert sorted(np.ravel(predicted)) == sorted(np.ravel(rows))
            pairs = data.map(lambda x: (x, x))
            np.testing.assert_allclose(model.evaluate(pairs, verbose=0), np.mean(rows), rtol=1e-6)
            history = model.fit(pairs, verbose=0, validation_data=PAIRS, validation_batch_size=BATCH).history
            np.testing.assert_allclose(history["loss"], [np.mean(rows)], rtol=1e-6)
            np.testing.assert_allclose(history["val_loss"], [np.mean(IDS)], rtol=1e-6)
        assert np.array_equal(model.predict(IDS, batch_size=BATCH, verbose=0), IDS)
        np.testing.assert_allclose(model.evaluate(*PAIRS, batch_size=BATCH, verbose=0), np.mean(IDS), rtol=1e-6)
        model.fit(*PAIRS, batch_size=2, verbose=0, callbacks=callbacks)
        assert ends[0] == 2, ends
        assert model.steps_per_execution == 3


def another_model_leaves_a_generators_state_alone() -> None:
    """Its thread draws ahead, on each rank another number of batches: a state that is set there changes the order."""
    other = []

    class Predicts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            time.sleep(1.0)  # the generator has run ahead as far as it will
            if kdist.is_chief():
                np.random.random()
            before = np.random.get_state()[1].tolist(), np.random.get_state()[2]
            other[0].predict(IDS[:4], verbose=0)
            assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == before

    with kdist.scope(scale_lr=None):
        other.append(Recorder())
        Recorder().fit(endless_shuffled(), steps_per_epoch=2, epochs=1, verbose=0, callbacks=[Predicts()])


def validation_data_that_draws_for_itself() -> None:
    """A generator to validate on draws in the background: the order of training is agreed on all the same."""

    class Augments(ShufflesItself):
        def __getitem__(self, index: int) -> Any:
            np.random.normal(size=1 + index)  # unequal on the ranks
            return super().__getitem__(index)

    def held_out() -> Iterator[Any]:
        while True:
            rows = -1 - np.random.randint(0, 5, size=(BATCH, 1)).astype("float32")
            yield rows, rows

    keras.utils.set_random_seed(5)
    arguments = {"x": Augments(), "shuffle": False, "validation_data": held_out(), "validation_steps": 2}
    epochs = seen_by_all(arguments, epochs=5)
    orders = [[row for row in flat(ranks) if row >= 0] for ranks in epochs]
    assert all(sorted(order) == list(range(ROWS)) for order in orders), orders
    assert len(set(map(tuple, orders))) == 5


def a_generator_to_validate_on_goes_on() -> None:
    """Nothing that its thread has drawn ahead is lost between two epochs: it would be more on one rank than another."""

    def held_out() -> Iterator[Any]:
        for number in itertools.count(1):
            rows = np.full((BATCH, 1), -number, "float32")
            yield rows, rows

    steps = 2 * kdist.size() + 1
    epochs = seen_by_all(
        {"x": IDS, "y": IDS, "batch_size": BATCH, "validation_data": held_out(), "validation_steps": steps}
    )
    for epoch, ranks in enumerate(epochs):
        found = [-row for row in flat(ranks) if row < 0]
        assert found == np.repeat(np.arange(1, steps + 1) + epoch * steps, BATCH).tolist(), (epoch, found)


def seeded_shuffles_that_one_rank_has_looked_into() -> None:
    """They give the orders that one process would see, and go on with them in a second `fit`."""
    first = lambda x, _: x  # noqa: E731
    pipelines = (
        lambda: pairs().shuffle(ROWS, seed=1).batch(BATCH),
        lambda: pairs().shuffle(ROWS, seed=1).batch(BATCH).map(lambda x, y: (x, y)).shuffle(3, seed=2),
        lambda: tf.data.Dataset.zip(pairs().shuffle(ROWS, seed=1).map(first), pairs().map(first)).batch(BATCH),
        lambda: (
            tf.data.Dataset.range(9)
            .shuffle(9, seed=1)
            .interleave(lambda part: pairs().shard(9, part), cycle_length=2)
            .batch(BATCH)
        ),
    )
    for number, pipeline in enumerate(pipelines):
        plain, callback, dataset = pipeline(), SeenOfEachEpoch(), pipeline()
        model = Recorder()
        model.fit(plain, epochs=EPOCHS - 1, verbose=0, callbacks=[callback])
        model.fit(plain, verbose=0, callbacks=[callback])
        expected = [sum(batches, []) for batches in callback.epochs]
        assert expected[0] != expected[1] != expected[2]
        if kdist.is_chief():
            next(iter(dataset))
        epochs = [*seen_by_all({"x": dataset}, EPOCHS - 1), *seen_by_all({"x": dataset}, 1)]
        found = [flat(ranks) for ranks in epochs]
        assert found == expected, (number, found, expected)
    # In the scope what is iterated by hand follows an order of its own, where the pipeline has none.
    parts = tf.data.Dataset.range(9).interleave(lambda part: pairs().shard(9, part), num_parallel_calls=2)
    dataset = parts.shuffle(ROWS, seed=1).batch(BATCH)
    with kdist.scope(scale_lr=None):
        if kdist.is_chief():
            next(iter(dataset))
    for ranks in seen_by_all({"x": dataset}, EPOCHS):
        assert sorted(flat(ranks)) == list(range(ROWS)), ranks


def streams_that_can_be_read_once() -> None:
    """Batches of unknown width: none is taken to see what they look like, where the model knows its weights."""

    def once(begin: int, end: int) -> tf.data.Dataset:
        stream = ((IDS[i : i + 2], IDS[i : i + 2]) for i in range(begin, end, 2))
        spec = tf.TensorSpec([None, None])
        return tf.data.Dataset.from_generator(lambda: stream, output_signature=(spec, spec))

    with kdist.scope(scale_lr=None):
        model = Recorder()
        model(IDS)
        model.fit(once(0, 12), verbose=0)
        assert flat(everyone(model.take_seen())) == list(range(12))
        model.evaluate(once(6, 12), verbose=0)
        assert flat(everyone(model.take_seen())) == list(range(6, 12))


def auto_shard_policy_off() -> None:
    """`AutoShardPolicy.OFF` says of one dataset what `auto_shard=False` says of all."""
    rank, size = kdist.rank(), kdist.size()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    mine = own_rows(rank, size)
    dataset = tf.data.Dataset.from_tensor_slices((mine, mine)).batch(BATCH).with_options(options)
    ranks = seen_by_all({"x": dataset}, epochs=1)[0]
    assert sorted(np.ravel(sum(ranks[rank], []))) == sorted(np.ravel(mine).astype(int))


def auto_shard_policy_file() -> None:
    """`AutoShardPolicy.FILE` shares out files."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for part in range(kdist.size() + 1):
            path = Path(folder, f"{part}.txt")
            path.write_text("".join(f"{row}\n" for row in range(part, ROWS, kdist.size() + 1)))
            paths.append(str(path))

        def parse(line: Any) -> Any:
            row = tf.reshape(tf.strings.to_number(line), [1])
            return row, row

        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
        dataset = tf.data.TextLineDataset(paths).map(parse).batch(BATCH).with_options(options)
        ranks = seen_by_all({"x": dataset}, epochs=1)[0]
    assert sorted(flat(ranks)) == list(range(ROWS))
    assert all(len({row % (kdist.size() + 1) for row in sum(steps, [])}) <= 2 for steps in ranks)


OTHERS = {
    function.__name__: function
    for function in (
        in_order_without_shuffle,
        one_seed_one_order,
        twice_in_a_row,
        a_fit_that_fits_twice,
        orders_of_before_the_scope_are_told_of,
        own_streams_of_unequal_lengths,
        own_streams_of_known_lengths,
        an_own_stream_may_be_empty,
        predictions_of_own_streams_come_step_by_step,
        own_streams_and_several_steps_an_execution,
        validation_data_that_draws_for_itself,
        another_model_leaves_a_generators_state_alone,
        a_generator_to_validate_on_goes_on,
        seeded_shuffles_that_one_rank_has_looked_into,
        streams_that_can_be_read_once,
        auto_shard_policy_off,
        auto_shard_policy_file,
    )
}

CASES = {**ORDERS, **OTHERS}
