"""Dropout and its kin: other draws on each rank, equal seed states, and the same again from the same seed."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from kdist._engine import open_engine
from tests.training.behaviours import assert_equal_everywhere, everyone, weights_of

ROWS = 8


class Masks(keras.Model):
    """Notes the mask that dropout drew in each step."""

    def __init__(self, layer: keras.layers.Layer) -> None:
        super().__init__()
        self.masks: list[list[bool]] = []
        self.drop, self.dense = layer, keras.layers.Dense(1)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        dropped = self.drop(inputs, training=training)

        def note(values: Any) -> Any:
            self.masks.append([bool(v) for v in np.ravel(values) == 0])
            return np.int32(0)

        if training:
            tf.numpy_function(note, [dropped], tf.int32)
        return self.dense(dropped)


class FunctionalDropout(keras.layers.Layer):
    """Draws from Keras' global generator, as `keras.random` does without a seed."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return keras.random.dropout(inputs, 0.5) if training else inputs


def train(make_layer: Any) -> tuple[list[list[bool]], keras.Model]:
    keras.utils.set_random_seed(11)
    x = np.ones((ROWS * kdist.size(), 6), "float32")
    y = np.linspace(0, 1, len(x))[:, None]
    with kdist.scope(scale_lr=None):
        model = Masks(make_layer())
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=ROWS // 2, epochs=2, verbose=0)
    return model.masks, model


def masks_differ_between_ranks_and_runs_are_reproducible() -> None:
    for make_layer in (
        lambda: keras.layers.Dropout(0.5),
        lambda: keras.layers.Dropout(0.5, seed=3),
        FunctionalDropout,
        lambda: keras.Sequential([keras.layers.GaussianNoise(0.1), keras.layers.Dropout(0.5)]),
    ):
        masks, model = train(make_layer)
        assert len(masks) == 4
        by_rank = everyone(masks)
        for one in range(kdist.size()):
            assert len({tuple(mask) for mask in by_rank[one]}) == 4, "each step draws anew"
            for other in range(one):
                assert all(a != b for a, b in zip(by_rank[one], by_rank[other], strict=True))
        states = [np.asarray(v).tolist() for v in model.non_trainable_variables]
        assert_equal_everywhere(states)
        assert_equal_everywhere(weights_of(model))
        again, repeated = train(make_layer)
        assert again == masks
        assert weights_of(repeated) == weights_of(model)


def augmentation_in_the_model_differs_too() -> None:
    """Random layers of preprocessing draw per rank as well."""
    images = np.arange(2 * kdist.size() * 16, dtype="float32").reshape(-1, 4, 4, 1)
    images[:] = images[:1]
    seen: list[Any] = []

    def note(values: Any) -> Any:
        seen.append(np.ravel(values).tolist())
        return np.int32(0)

    class Noting(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            tf.numpy_function(note, [inputs], tf.int32)
            return inputs

    with kdist.scope(scale_lr=None):
        model = keras.Sequential(
            [
                keras.Input((4, 4, 1)),
                keras.layers.GaussianNoise(1.0),
                Noting(),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        model.fit(images, np.zeros(len(images)), batch_size=2, verbose=0)
    drawn = everyone(seen[-1])
    assert len({tuple(each) for each in drawn}) == kdist.size()


def augmentation_in_a_map_differs_too() -> None:
    """Made before the scope, with seeds that are equal on all ranks; a map of samples and one of batches."""

    def trained(make_augment: Any, of_batches: bool) -> list[list[bool]]:
        keras.utils.set_random_seed(11)
        augment = make_augment()
        x = np.ones((ROWS * kdist.size(), 6), "float32")
        dataset = tf.data.Dataset.from_tensor_slices((x, np.linspace(0, 1, len(x))[:, None]))
        dataset = dataset.batch(ROWS // 2) if of_batches else dataset
        dataset = dataset.map(lambda row, target: (augment(row), target))
        with kdist.scope(scale_lr=None):
            model = Masks(keras.layers.Activation("linear"))
            model.compile("sgd", "mse")
            model.fit(dataset if of_batches else dataset.batch(ROWS // 2), verbose=0)
        return model.masks

    def of_keras() -> Any:
        layer = keras.layers.Dropout(0.5)
        return lambda row: layer(row, training=True)

    def of_tensorflow() -> Any:
        return lambda row: row * tf.cast(tf.random.uniform(tf.shape(row)) > 0.5, row.dtype)

    for make_augment in (of_keras, of_tensorflow):
        for of_batches in (False, True):
            masks = trained(make_augment, of_batches)
            by_rank = everyone(masks)
            assert [len({tuple(mask) for mask in masks}) for masks in zip(*by_rank, strict=True)] == [kdist.size()] * 2
            assert trained(make_augment, of_batches) == masks


def global_seeds_stay_the_users() -> None:
    """NumPy and Python draw the same on all ranks after the scope is entered, seeded or not."""
    import random

    with kdist.scope():
        pass
    assert_equal_everywhere([float(np.random.random()), random.random()])


NUMBERS = np.arange(40)


def wait_long_first(number: Any) -> Any:
    """Takes longer for one number than for the next: what runs in parallel comes out of order."""

    def wait(number: Any) -> Any:
        time.sleep(0.02 * (number % 3 == kdist.rank()))
        return number

    return tf.numpy_function(wait, [number], tf.int64)


def iterating_by_hand_follows_one_order() -> None:
    """Unseeded shuffles, made before the scope or inside, anywhere in a pipeline."""
    tf.random.set_seed(None)  # no seed, whatever a case before has set
    engine = open_engine(kdist.cluster_info())  # gives devices other names over TensorFlow's collectives: limits.md
    before = tf.data.Dataset.from_tensor_slices(NUMBERS).shuffle(40)
    with kdist.scope():
        inside = tf.data.Dataset.from_tensor_slices(NUMBERS + 100).shuffle(40).map(lambda number: number - 100)
        files = tf.data.Dataset.range(4).interleave(
            lambda part: tf.data.Dataset.range(10 * part, 10 * part + 10).map(wait_long_first),
            cycle_length=4,
            num_parallel_calls=4,
            deterministic=False,
        )
        sloppy = tf.data.Options()
        sloppy.deterministic = False
        slow = tf.data.Dataset.range(12).map(wait_long_first, num_parallel_calls=4).with_options(sloppy)
        filtered = tf.data.Dataset.from_tensor_slices(NUMBERS).shuffle(40).filter(lambda number: number >= 0)
        halves = [tf.data.Dataset.from_tensor_slices(half) for half in np.split(NUMBERS, 2)]
        choices = tf.data.Dataset.range(2).shuffle(2).repeat(10)
        chosen = tf.data.Dataset.choose_from_datasets(halves, choices)
        drawn = []
        for dataset in (before, inside, files, slow, filtered, chosen):
            batches = dataset.batch(7)
            for each in (dataset, dataset, batches, batches.take(2), batches.take(2)):
                drawn.append([np.ravel(element).tolist() for element in each.as_numpy_iterator()])
            drawn.append(batches.take(1).get_single_element().numpy().tolist())
            drawn.append(int(dataset.reduce(np.int64(0), lambda sum, number: 7 * sum + number)))
        rows = next(iter(before.batch(8)))
        vocabulary = keras.layers.TextVectorization()
        vocabulary.adapt(before.take(5).map(tf.strings.as_string))
        bootstraps = [[int(number) for number in before.take(5)] for _ in range(3)]
        assert bootstraps[0] != bootstraps[1] != bootstraps[2]
        kept = [sum(part, []) for part in drawn[:2]]
        assert kept[0] != kept[1], "another order in each iteration"
        assert sorted(kept[0]) == sorted(kept[1]) == NUMBERS.tolist()
        for each in (*drawn, rows.numpy().tolist(), vocabulary.get_vocabulary(), bootstraps):
            assert_equal_everywhere(each)
        if kdist.is_chief():
            next(iter(before))  # alone: no other rank waits
    alone = [int(number) for number in before]
    assert engine.gather_objects(alone).count(alone) == 1, "after the scope it is TensorFlow's own order again"


def a_split_by_hand_is_that_of_the_methods() -> None:
    """An order that stays is one for what is iterated by hand and what `fit` sees."""
    seen: list[int] = []

    class Noting(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            tf.numpy_function(lambda rows: seen.extend(rows[:, 0].astype(int).tolist()), [inputs], [])
            return self.dense(inputs)

    shuffled = tf.data.Dataset.from_tensor_slices(NUMBERS.astype("float32"))
    shuffled = shuffled.shuffle(40, reshuffle_each_iteration=False)
    with kdist.scope():
        model = Noting()
        model.compile("sgd", "mse")
        held_out = {int(number) for number in shuffled.take(8)}
        train = shuffled.skip(8).map(lambda number: ([number], [number])).batch(4)
        model.fit(train, verbose=0)
    assert_equal_everywhere(sorted(held_out))
    assert sorted(set(sum(everyone(seen), []))) == sorted(set(NUMBERS.tolist()) - held_out)


def a_vocabulary_of_a_shuffled_split_is_one() -> None:
    """TensorFlow's tutorial on text: shuffled, split by `take` and `skip`, a vocabulary built by hand for a `map`."""
    tf.random.set_seed(None)
    words = [f"{'good' if number % 2 else 'bad'}{number % 20}" for number in range(400)]
    labels = [float(word.startswith("good")) for word in words]
    with kdist.scope(scale_lr=None):
        data = tf.data.Dataset.from_tensor_slices((words, labels)).shuffle(400, reshuffle_each_iteration=False)
        train, held_out = data.skip(80), data.take(80)
        seen: dict[str, int] = {}
        for word, _ in train:  # in the order of their first occurrence
            seen.setdefault(word.numpy().decode(), len(seen))
        assert_equal_everywhere(list(seen))
        lookup = keras.layers.StringLookup(vocabulary=list(seen))
        model = keras.Sequential([keras.layers.Embedding(22, 1), keras.layers.Flatten()])
        model.compile(
            keras.optimizers.SGD(5.0), keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"]
        )

        def numbered(part: tf.data.Dataset) -> tf.data.Dataset:
            return part.map(lambda word, label: ([lookup(word)], [label])).batch(8)

        model.fit(numbered(train), epochs=10, verbose=0)
        accuracy = model.evaluate(numbered(held_out), verbose=0, return_dict=True)["accuracy"]
    assert accuracy > 0.97, accuracy


def tensorflows_draws_agree_outside_of_steps() -> None:
    """Noise for a callback, weights made by hand, a shuffle of a `PyDataset` between epochs; not in steps."""
    tf.random.normal([])
    if kdist.is_chief():
        keras.random.normal([])  # Keras' global seed generator

    orders: list[list[int]] = []
    noise: list[list[float]] = []
    in_steps: list[list[float]] = []

    class Shuffled(keras.utils.PyDataset):
        order = np.arange(8)

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            rows = np.full((2, 3), self.order[index], "float32")
            return rows, rows[:, :1]

        def on_epoch_end(self) -> None:
            self.order = tf.random.shuffle(self.order).numpy()
            orders.append(self.order.tolist())

    class Drawing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if kdist.is_chief():
                tf.random.uniform([])  # alone
            noise.append(tf.random.normal([3]).numpy().tolist() if epoch else [])

    class Noisy(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            drawn = tf.random.uniform([3])
            tf.numpy_function(lambda values: in_steps.append(values.tolist()), [drawn], [])
            return inputs + drawn

    for run_eagerly in (False, True):
        with kdist.scope(scale_lr=None):
            by_hand = [tf.Variable(tf.random.normal([4])), tf.random.uniform([4]), tf.random.shuffle(NUMBERS)]
            by_hand += [keras.random.normal([4]), tf.image.random_brightness(np.ones((4, 1, 1)), 0.5)]
            assert_equal_everywhere([np.ravel(each).tolist() for each in by_hand])
            again = tf.random.uniform([4])
            assert (again.numpy() != by_hand[1].numpy()).all()
            model = keras.Sequential([keras.Input((3,)), Noisy(), keras.layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=run_eagerly)
            in_steps.clear()
            model.fit(Shuffled(), epochs=2, shuffle=False, verbose=0)
            drawn = everyone(in_steps[run_eagerly:])  # an eager model is first built by a call, alike on all ranks
            assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))
    assert_equal_everywhere(orders)


def seeded_draws_differ_in_steps() -> None:
    """By `tf.random`, with a seed of the user's."""
    seen: list[list[float]] = []

    class Noisy(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            drawn = tf.concat([tf.random.uniform([3]), tf.random.uniform([3], seed=4)], 0)
            tf.numpy_function(lambda values: seen.append(values.tolist()), [drawn], [])
            return inputs + drawn[0]

    def trained(seed: int, **compiled: Any) -> list[list[float]]:
        keras.utils.set_random_seed(seed)
        with kdist.scope(scale_lr=None):
            model = keras.Sequential([keras.Input((3,)), Noisy(), keras.layers.Dense(1)])
            model.compile("sgd", "mse", **compiled)
            seen.clear()
            model.fit(np.zeros((4 * kdist.size(), 3)), np.zeros(4 * kdist.size()), batch_size=2, verbose=0)
        return seen[compiled["run_eagerly"] :]  # an eager model is first built by a call, alike on all ranks

    for run_eagerly in (False, True):
        drawn = everyone(trained(11, run_eagerly=run_eagerly))
        for one, other in zip(drawn[0], drawn[1], strict=True):
            assert set(one).isdisjoint(other)
        assert trained(11, run_eagerly=run_eagerly) == drawn[kdist.rank()], "reproducible"


def what_the_user_seeds_draws_as_without_kdist() -> None:
    def drawn() -> list[Any]:
        numbers = tf.data.Dataset.from_tensor_slices(NUMBERS)
        found = [tf.random.normal([3]), tf.random.normal([3], seed=4), np.random.normal(size=3)]
        for dataset in (numbers.shuffle(40), numbers.shuffle(40, seed=5)):
            found += [[int(number) for number in dataset] for _ in range(2)]
        return [np.asarray(each).tolist() for each in found]

    keras.utils.set_random_seed(9)
    plain = drawn()
    with kdist.scope():
        keras.utils.set_random_seed(9)
        assert drawn() == plain
    keras.utils.set_random_seed(9)
    with kdist.scope():
        assert drawn() == plain


CASES = {
    function.__name__: function
    for function in (
        masks_differ_between_ranks_and_runs_are_reproducible,
        augmentation_in_the_model_differs_too,
        augmentation_in_a_map_differs_too,
        global_seeds_stay_the_users,
        iterating_by_hand_follows_one_order,
        a_split_by_hand_is_that_of_the_methods,
        a_vocabulary_of_a_shuffled_split_is_one,
        tensorflows_draws_agree_outside_of_steps,
        seeded_draws_differ_in_steps,
        what_the_user_seeds_draws_as_without_kdist,
    )
}
