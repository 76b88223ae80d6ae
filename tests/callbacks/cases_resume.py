"""An interrupted training, taken up again, against one that was not: bit for bit, on as many ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist._engine import open_engine
from kdist.checkpoint.storage.files import CheckpointDirectory
from kdist.errors import CheckpointError, ScopeError
from kdist.restarts.progress import own_progress
from tests.helpers.logs import logged
from tests.training.behaviours import assert_equal_everywhere
from tests.training.fidelity import BATCH, OwnStep, compare, deterministic_weights, fresh, mlp, outcome

STEPS = 6  # of an epoch, whatever the number of ranks
EPOCHS = 3


class Interrupted(Exception):
    """Stands for the end of the process."""


class InterruptAt(keras.callbacks.Callback):
    """Ends `fit` on all ranks, after a step or at the end of an epoch."""

    def __init__(self, epoch: int, batch: int | None) -> None:
        super().__init__()
        self._place, self._epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if self._place == (epoch - 1, None):
            raise Interrupted

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self._epoch, batch) == self._place:
            raise Interrupted


class Shuffled(keras.utils.PyDataset):
    """Shuffles as Keras' own examples do: with NumPy's global state, when an epoch ends."""

    def __init__(self, x: Any, y: Any, batch: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.x, self.y, self.batch = x, y, batch
        self.indices = np.arange(len(x))

    def __len__(self) -> int:
        return -(-len(self.x) // self.batch)

    def __getitem__(self, index: int) -> Any:
        chosen = self.indices[index * self.batch : (index + 1) * self.batch]
        return self.x[chosen], self.y[chosen]


class ShuffledByItself(Shuffled):
    def on_epoch_end(self) -> None:
        np.random.shuffle(self.indices)


def arrays() -> tuple[Any, Any]:
    generator = np.random.default_rng(5)
    n = STEPS * kdist.size() * BATCH - 3
    x = generator.normal(size=(n, 5))
    return x, x @ generator.normal(size=(5, 2))


def stream(x: Any, y: Any) -> Iterator[Any]:
    generator = np.random.default_rng(0)
    while True:
        chosen = generator.integers(len(x), size=BATCH)
        yield x[chosen], y[chosen]


def inputs(kind: str) -> dict[str, Any]:
    """Returns the arguments of `fit` that feed it."""
    x, y = arrays()
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    per_epoch = STEPS * kdist.size()
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    if kind == "arrays_steps":  # a pass holds more than an epoch
        return {"x": x, "y": y, "batch_size": BATCH, "steps_per_epoch": per_epoch - 2 * kdist.size()}
    if kind == "tf_data":
        return {"x": dataset.shuffle(40, seed=7).batch(BATCH)}
    if kind == "tf_data_unseeded":
        return {"x": dataset.shuffle(40).batch(BATCH)}
    if kind == "tf_data_repeat":
        return {"x": dataset.shuffle(40, seed=7).repeat().batch(BATCH), "steps_per_epoch": per_epoch}
    if kind == "tf_data_unknown":
        return {"x": dataset.shuffle(40, seed=7).batch(BATCH).filter(lambda *_: True)}
    if kind == "py_dataset":
        return {"x": Shuffled(x, y, BATCH), "shuffle": True}
    if kind == "py_dataset_workers":
        return {"x": Shuffled(x, y, BATCH, workers=2), "shuffle": True}
    if kind == "py_dataset_by_itself":
        return {"x": ShuffledByItself(x, y, BATCH), "shuffle": False}
    if kind == "generator":
        return {"x": stream(x, y), "steps_per_epoch": per_epoch}
    raise ValueError(kind)


def network(width: int = 8) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(width, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(2),
        ]
    )
    deterministic_weights(model)
    return model


def others() -> list[Any]:
    return [
        keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=0.2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.5, min_delta=0.5),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    ]


def train(
    kind: str,
    folder: str,
    callbacks: list[Any],
    *,
    save_freq: Any = 2,
    epochs: int = EPOCHS,
    optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.02),
    scope: dict[str, Any] | None = None,
    backup: Any = kdist.callbacks.BackupAndRestore,
    width: int = 8,
    is_small: bool = False,
    backup_first: bool = False,
    **compile_: Any,
) -> dict[str, Any]:
    """Trains as a script does from its first line, and returns all that must be equal.

    A small model has weights alone, and no metrics: for cases that are not about kinds of state.
    """
    fresh()
    with kdist.scope(**(scope or {})):
        model = mlp() if is_small else network(width)
        metrics = [] if is_small else ["mae", keras.metrics.R2Score()]
        model.compile(optimizer(), "mse", metrics=metrics, **compile_)
        saving = [backup(folder, save_freq=save_freq, delete_checkpoint=False)]
        in_order = [*saving, *callbacks] if backup_first else [*callbacks, *saving]
        history = model.fit(**inputs(kind), epochs=epochs, verbose=0, callbacks=in_order)
    return {
        "weights": [np.asarray(v).tolist() for v in model.weights],
        "optimizer": [np.asarray(v).tolist() for v in model.optimizer.variables],
        "history": history.history,
        "epochs": history.epoch,
    }


def shared_folder() -> str:
    return open_engine(kdist.cluster_info()).broadcast_object(tempfile.mkdtemp() if kdist.is_chief() else None)


def checkpoints(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("checkpoint-*"))


@functools.cache  # several cases interrupt the same training
def uninterrupted(kind: str, **compile_: Any) -> dict[str, Any]:
    """Returns what `train` does with the `others`: who saves, and how often, changes nothing."""
    return train(kind, shared_folder(), others(), **compile_)


@functools.cache
def small_uninterrupted() -> dict[str, Any]:
    """Returns what `train` does with a small model, and no callbacks."""
    return train("arrays", shared_folder(), [], is_small=True)


@contextlib.contextmanager
def resuming(times: int = 1) -> Iterator[None]:
    """Asserts that trainings go on from a checkpoint so many times: from the beginning they would end alike."""
    with logged() as lines:
        yield
    if kdist.is_chief():
        assert "\n".join(lines).count("training resumes from checkpoint-") == times, "\n".join(lines)


def resumed(
    kind: str, places: list[tuple[int, int | None]], saving: dict[str, Any] | None = None, **compile_: Any
) -> None:
    """Trains without an interruption, and with some, and compares."""
    expected, settings = uninterrupted(kind, **compile_), {**(saving or {}), **compile_}
    folder = shared_folder()
    with resuming(len(places)):
        for place in places:
            with pytest.raises(Interrupted):
                train(kind, folder, [InterruptAt(*place), *others()], **settings)
        found = train(kind, folder, others(), **settings)
    for part in expected:
        assert expected[part] == found[part], part
    assert_equal_everywhere(found)


def between_epochs(kind: str) -> None:
    resumed(kind, [(0, None)], {"save_freq": "epoch"})


def in_an_epoch(kind: str) -> None:
    # After the step that was saved, and a step later, which is made again.
    resumed(kind, [(0, 3), (1, 0 if kind == "arrays_steps" else 4)])


def epochs_that_share_a_pass() -> None:
    """In one process, too: with `steps_per_epoch` Keras goes on where the last epoch ended."""
    for kind in ("generator", "arrays_steps"):
        resumed(kind, [(0, None), (1, 1)], {"save_freq": 1})


def with_another_batch_size() -> None:
    """In one process, too, the step is converted; where none begins there, the one before is made again."""
    for batch_size in (2 * BATCH, STEPS * BATCH, BATCH // 2):
        folder = shared_folder()
        with pytest.raises(Interrupted):
            train("arrays", folder, [InterruptAt(0, 4)])  # 4 steps were saved
        model = network()
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae", keras.metrics.R2Score()])
        backup = kdist.callbacks.BackupAndRestore(folder, save_freq=100, delete_checkpoint=False)
        data = {**inputs("arrays"), "batch_size": batch_size}
        model.fit(**data, epochs=2, verbose=0, callbacks=[backup])
        num_steps = -(-len(data["x"]) // batch_size)
        assert int(model.optimizer.iterations) == 4 + 2 * num_steps - 4 * BATCH // batch_size, batch_size


def after_the_last_step_of_unknown_length() -> None:
    """That no step is left is known when the data has ended: the epoch's logs are those of the saved metrics."""
    resumed("tf_data_unknown", [(0, None)])


KEPT = {
    "power_sgd": ("residual/", {"compression": "powersgd", "powersgd_rank": 1}),
    "top_k": ("residual/", {"compression": "topk", "topk_ratio": 0.2}),
    "outer_momentum": ("velocity/", {"sync_every": 3, "outer_learning_rate": 0.7, "outer_momentum": 0.9}),
}
"""What slots of a checkpoint are called beside the optimizer's, and the arguments of the strategy that keeps them."""


def what_is_kept_beside_the_model(kept: str, options: dict[str, Any]) -> None:
    """What compression has left out, summed over the ranks, or an outer momentum; whoever saves goes on with that."""
    scope = {"strategy": kdist.AllReduce(**options)}
    trained = functools.partial(train, "arrays", scope=scope, width=260, save_freq=4)
    folder, expected = shared_folder(), trained(shared_folder(), others())
    for place in ((0, 3), (1, 2)):  # right after a save, and two steps later
        with pytest.raises(Interrupted):
            trained(folder, [InterruptAt(*place), *others()])
    assert trained(folder, others()) == expected, options
    if kdist.is_chief():
        _, saved = CheckpointDirectory(folder).read()
        assert any(array.any() for name, array in saved["slots"].items() if name.startswith(kept))


def the_newest_is_damaged(damage: Callable[[Path], None]) -> None:
    """The one before it is used, and that is said; nothing is deleted."""
    expected = uninterrupted("arrays")
    folder = shared_folder()
    with pytest.raises(Interrupted):
        train("arrays", folder, [InterruptAt(1, 3), *others()])
    newest = checkpoints(folder)[-1] if kdist.is_chief() else None
    if newest is not None:
        damage(newest)
    with logged() as lines:
        found = train("arrays", folder, others())
    assert expected == found
    if newest is not None:
        assert f"{newest} cannot be read" in "\n".join(lines), "\n".join(lines)
        assert newest.is_dir()
        assert len([each for each in checkpoints(folder) if each != newest]) == 2


def _cut_off(newest: Path) -> None:
    with open(newest / "arrays.npz", "r+b") as file:
        file.truncate(1000)


def _flip(newest: Path) -> None:
    data = bytearray((newest / "arrays.npz").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "arrays.npz").write_bytes(bytes(data))


def _take_away(newest: Path) -> None:
    (newest / "state.json").unlink()


def none_can_be_read() -> None:
    folder = shared_folder()
    with pytest.raises(Interrupted):
        train("arrays", folder, [InterruptAt(1, 3)], is_small=True)
    if kdist.is_chief():
        for each in checkpoints(folder):
            _cut_off(each)
        with pytest.raises(CheckpointError, match="No checkpoint can be read"):
            CheckpointDirectory(folder).read()
        assert len(checkpoints(folder)) == 2


def a_resumed_fit_that_raises_leaves_no_epoch_behind() -> None:
    folder = shared_folder()
    with kdist.scope():
        model = mlp()
        model.compile("sgd", "mse")
        for place in ((1, 0), (1, 1)):
            callbacks = [kdist.callbacks.BackupAndRestore(folder), InterruptAt(*place)]
            with pytest.raises(Interrupted):
                model.fit(**inputs("arrays"), epochs=3, verbose=0, callbacks=callbacks)
        assert model.fit(**inputs("arrays"), epochs=1, verbose=0).epoch == [0]


def another_model() -> None:
    folder = shared_folder()
    with pytest.raises(Interrupted):
        train("arrays", folder, [InterruptAt(0, 3)], is_small=True)
    with pytest.raises(CheckpointError, match="of another model or optimizer"):
        train("arrays", folder, [], optimizer=lambda: keras.optimizers.SGD(0.1), is_small=True)


class Scaled(OwnStep):
    """Its step updates a variable that Keras tracks, or one that it does not."""

    def __init__(self, *, is_tracked: bool) -> None:
        super().__init__()
        self.scale = (keras.Variable if is_tracked else tf.Variable)(np.ones(()), name="scale")
        self.build((None, 5))
        deterministic_weights(self)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True) * self.scale)
        variables = list({id(each): each for each in (*self.trainable_variables, self.scale)}.values())
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def a_step_that_updates_what_the_model_does_not_track() -> None:
    """It cannot be resumed, which is told of when it is saved; as an attribute that Keras tracks it can."""

    def trained(folder: str, *callbacks: keras.callbacks.Callback, is_tracked: bool) -> Any:
        fresh()
        with kdist.scope():
            model = Scaled(is_tracked=is_tracked)
            model.compile(keras.optimizers.Adam(0.02), "mse")
            backup = kdist.callbacks.BackupAndRestore(folder, save_freq=2, delete_checkpoint=False)
            history = model.fit(**inputs("arrays"), epochs=2, verbose=0, callbacks=[*callbacks, backup])
        return history.history, [np.asarray(each).tolist() for each in (*model.weights, model.scale)]

    folder = shared_folder()
    with logged() as lines, pytest.raises(Interrupted):
        trained(folder, InterruptAt(0, 4), is_tracked=False)  # after two saves
    warnings = [line for line in lines if "cannot be resumed" in line]
    assert len(warnings) == kdist.is_chief(), lines
    assert all("an optimizer that updates scale" in line for line in warnings), warnings
    with pytest.raises(CheckpointError, match=r"cannot be resumed.* Received: scale.* keras.Variable"):
        trained(folder, is_tracked=False)
    with logged() as lines:
        expected, folder = trained(shared_folder(), is_tracked=True), shared_folder()
        with pytest.raises(Interrupted):
            trained(folder, InterruptAt(0, 4), is_tracked=True)
        with resuming():
            assert trained(folder, is_tracked=True) == expected
    assert not any("does not track" in line for line in lines), lines


def another_engine() -> None:
    """It is said that sums may be rounded otherwise."""
    folder, told = shared_folder(), ""
    with pytest.raises(Interrupted):
        train("arrays", folder, [InterruptAt(0, 3)], is_small=True)
    if kdist.is_chief():
        saved = CheckpointDirectory(folder)
        found = saved.read()[1]
        told = f"saved with engine pigeons and is resumed with {found['training']['engine']}:"
        saved.write({**found, "training": {**found["training"], "engine": "pigeons"}})
    with logged() as lines:
        train("arrays", folder, [], epochs=1, is_small=True)
    assert told in "\n".join(lines)


def scaled_rates_and_schedules() -> None:
    """The warm-up goes on where it was, and so does a schedule, which counts the user's own steps."""
    schedule = keras.optimizers.schedules.CosineDecay
    for optimizer, scope in (
        (lambda: keras.optimizers.SGD(0.01, momentum=0.9), {"scale_lr": 3.0, "warmup_epochs": 2}),
        (lambda: keras.optimizers.Adam(schedule(0.02, STEPS * EPOCHS * kdist.size())), {"scale_lr": 1.0}),
    ):
        trained = functools.partial(train, "arrays", optimizer=optimizer, scope=scope, is_small=True)
        expected, folder = trained(shared_folder(), []), shared_folder()
        with pytest.raises(Interrupted):
            trained(folder, [InterruptAt(1, 4)])
        with resuming():
            assert trained(folder, []) == expected


def several_steps_an_execution() -> None:
    resumed("arrays", [(1, 3)], steps_per_execution=2)


def kerass_own_in_a_scope_is_ours() -> None:
    """Also where the last rank alone is given one."""

    def on_one(folder: str, **kwargs: Any) -> Any:
        backup = keras.callbacks.BackupAndRestore(folder, **kwargs)
        return backup if kdist.rank() == kdist.size() - 1 else keras.callbacks.Callback()

    folder = shared_folder()
    with resuming(2):  # each saves what the other goes on from
        with pytest.raises(Interrupted):
            train("arrays", folder, [InterruptAt(0, 3)], backup=on_one, is_small=True)
        with pytest.raises(Interrupted):
            train("arrays", folder, [InterruptAt(1, 4)], backup=keras.callbacks.BackupAndRestore, is_small=True)
        assert train("arrays", folder, [], backup=on_one, is_small=True) == small_uninterrupted()


def a_backup_of_kerass_own_is_told_of() -> None:
    """It is not read: who leaves one process for several must hear of it."""
    folder, expected = shared_folder(), small_uninterrupted()
    if kdist.is_chief():
        model = mlp()
        model.compile("sgd", "mse")
        with pytest.raises(Interrupted):
            model.fit(
                **inputs("arrays"), verbose=0, epochs=3,
                callbacks=[keras.callbacks.BackupAndRestore(folder), InterruptAt(1, None)],
            )  # fmt: skip
    kdist.barrier()
    with logged() as lines:
        assert train("arrays", folder, [], is_small=True) == expected
    assert ("load_weights('" in "\n".join(lines)) == kdist.is_chief()


def with_callbacks_of_kdist() -> None:
    def callbacks() -> list[Any]:
        return [kdist.callbacks.LearningRateSchedule(lambda epoch: 0.5**epoch), kdist.callbacks.Throughput()]

    def of_the_training(found: dict[str, Any]) -> list[Any]:
        history = {name: found["history"][name] for name in ("loss", "mae", "effective_learning_rate")}
        return [found["weights"], found["optimizer"], history]

    expected = train("arrays", shared_folder(), callbacks())
    for backup_first in (False, True)[: 2 if kdist.size() == 1 else 1]:  # of several ranks it is always the last
        folder = shared_folder()
        with pytest.raises(Interrupted):
            train("arrays", folder, [InterruptAt(1, 4), *callbacks()], backup_first=backup_first)
        with resuming():
            found = train("arrays", folder, callbacks(), backup_first=backup_first)
        assert of_the_training(found) == of_the_training(expected)


def interrupted_while_it_goes_there() -> None:
    """In one process the steps that were made are passed over: a `fit` that ends meanwhile leaves nothing of that."""
    folder, expected = shared_folder(), train("arrays", shared_folder(), [])
    with pytest.raises(Interrupted):
        train("arrays", folder, [InterruptAt(0, 4)])
    fresh()
    with kdist.scope():
        model = network()
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae", keras.metrics.R2Score()])
        backup = kdist.callbacks.BackupAndRestore(folder, save_freq=2, delete_checkpoint=False)
        with pytest.raises(Interrupted):
            model.fit(**inputs("arrays"), epochs=EPOCHS, verbose=0, callbacks=[InterruptAt(0, 1), backup])
        history = model.fit(**inputs("arrays"), epochs=EPOCHS, verbose=0, callbacks=[backup])
    assert history.history == expected["history"]
    assert [np.asarray(v).tolist() for v in model.weights] == expected["weights"]


class FromTheModel(keras.callbacks.Callback):
    """A warm-up as users write it: it begins at the model's step."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.step = int(self.model.optimizer.iterations)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        self.model.optimizer.learning_rate = 0.02 * min(1.0, self.step / (2 * STEPS))


class Looking(keras.callbacks.Callback):
    """Evaluates when an epoch begins, before its metrics go on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        x, y = arrays()
        self.found.append(self.model.evaluate(x[:8], y[:8], verbose=0))


def what_a_callback_takes_from_the_model_when_training_begins() -> None:
    """In one process, too, the model is restored before: Keras' own callback is usually the first of the list."""
    expected = train("arrays", shared_folder(), [FromTheModel()])
    # In one process Keras calls such a callback in the steps, too, that it passes over.
    for place in ((0, None), (1, 3))[: 1 if kdist.size() == 1 else 2]:
        folder = shared_folder()
        with pytest.raises(Interrupted):
            train("arrays", folder, [InterruptAt(*place), FromTheModel()])
        # `ChiefOnly` on several ranks sets the rate on one of them between two steps.
        given = kdist.callbacks.ChiefOnly(FromTheModel()) if kdist.size() == 1 else FromTheModel()
        with resuming():
            assert train("arrays", folder, [given]) == expected


def an_evaluation_when_a_resumed_epoch_begins() -> None:
    first, again = Looking(), Looking()
    expected = train("arrays", shared_folder(), [first])
    folder = shared_folder()
    with pytest.raises(Interrupted):
        train("arrays", folder, [InterruptAt(1, 3), Looking()])
    with resuming():
        found = train("arrays", folder, [again])
    compare(expected, found)  # the metrics of the evaluation, which go on, are added in another order
    assert again.found[-1] == first.found[-1]


def stopped_early_stays_stopped() -> None:
    """Interrupted between the decision and the end, which restores the best weights."""

    class AtEnd(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            raise Interrupted

    def stopping() -> list[Any]:
        return [keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=9.0, restore_best_weights=True)]

    trained = functools.partial(train, "arrays", is_small=True)
    expected = trained(shared_folder(), stopping(), epochs=9)
    assert len(expected["epochs"]) < 9
    folder = shared_folder()
    with pytest.raises(Interrupted):
        trained(folder, [AtEnd(), *stopping()], epochs=9, save_freq="epoch")
    with resuming(2):
        assert trained(folder, stopping(), epochs=9) == expected
        assert trained(folder, [], epochs=11)["epochs"] == list(range(11)), "asked for more, it goes on"


def deleted_at_the_end() -> None:
    folder = shared_folder()
    with kdist.scope():
        model = mlp()
        model.compile("sgd", "mse")
        backup = kdist.callbacks.BackupAndRestore(folder)
        model.fit(**inputs("arrays"), epochs=2, verbose=0, callbacks=[backup])
        assert not os.path.exists(folder)
        model.fit(**inputs("arrays"), epochs=2, verbose=0, callbacks=[backup])  # from the beginning
    assert int(model.optimizer.iterations) == 4 * STEPS


def folds_of_which_some_are_left_out() -> None:
    """In a script that begins again, and leaves out what had ended, the second call of `fit` is another fold's."""

    def fold(number: int, folder: str, *callbacks: Any) -> tuple[list[int], list[Any]]:
        fresh()
        x, y = arrays()
        with kdist.scope():
            model = mlp()
            model.compile("sgd", "mse")
            backup = kdist.callbacks.BackupAndRestore(folder, save_freq=2)
            fitted = model.fit(x + number, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[*callbacks, backup])
        return fitted.epoch, [np.asarray(v).tolist() for v in model.weights]

    expected = fold(2, shared_folder())
    for leaves_out in (True, False) if kdist.size() > 1 else (False,):  # one process does not compare data
        folder = shared_folder()
        own_progress.begin_again(is_chief=False)
        fold(0, folder)
        with pytest.raises(Interrupted):
            fold(1, folder, InterruptAt(1, 2))
        own_progress.begin_again(is_chief=False)
        if not leaves_out:
            fold(0, folder)
        with resuming(0 if leaves_out else 1):
            fold(1, folder)
        with logged() as lines, resuming(0):
            assert fold(2, folder) == expected
        told = [line for line in lines if "of a call of `fit` on other data" in line]
        assert len(told) == (leaves_out and kdist.is_chief()), lines


def told_to_go(kind: str, rank: int, place: tuple[int, int | None]) -> None:
    """A signal on one rank: all leave after the same step with the same code, and can go on."""
    expected = uninterrupted(kind)
    folder = shared_folder()

    class Signal(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (self.epoch, batch) == place and kdist.rank() == rank:
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGUSR1)  # as Slurm does at a time limit

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if (epoch, None) == place and kdist.rank() == rank:
                os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    fresh()
    with logged() as lines:
        with kdist.scope():
            model = network()
            model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae", keras.metrics.R2Score()])
        with pytest.raises(SystemExit) as left:  # in the scope it would end the job
            model.fit(
                **inputs(kind),
                epochs=EPOCHS,
                verbose=0,
                callbacks=[
                    kdist.callbacks.Preemption(exit_code=76),
                    Signal(),
                    *others(),
                    kdist.callbacks.BackupAndRestore(folder, delete_checkpoint=False),
                ],
            )
    assert left.value.code == 76
    assert signal.getsignal(signal.SIGUSR1) == before
    assert_equal_everywhere(int(model.optimizer.iterations))
    if kdist.is_chief():
        assert f"SIGUSR1 on rank {rank}: saved" in "\n".join(lines), "\n".join(lines)
    if place[1] is not None and place[1] + 2 < STEPS:
        assert int(model.optimizer.iterations) == place[0] * STEPS + place[1] + 1
    assert train(kind, folder, others(), save_freq="epoch") == expected


def told_to_go_in_an_epoch() -> None:
    for rank in range(kdist.size()):
        told_to_go("arrays", rank, (1, 2))


def told_to_go_in_the_last_step_and_between_epochs() -> None:
    told_to_go("py_dataset", kdist.size() - 1, (0, STEPS - 1))
    told_to_go("py_dataset", kdist.size() - 1, (1, STEPS - 2))
    told_to_go("arrays", kdist.size() - 1, (0, None))


def told_to_go_when_training_ends() -> None:
    """A signal after the last epoch, as in its last save: the checkpoint stays, and the next attempt ends the `fit`."""
    expected = uninterrupted("arrays")
    folder = shared_folder()

    class Signal(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            if kdist.rank() == kdist.size() - 1:
                os.kill(os.getpid(), signal.SIGUSR1)

    fresh()
    with kdist.scope():
        model = network()
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae", keras.metrics.R2Score()])
    with pytest.raises(SystemExit, match="75"):
        model.fit(
            **inputs("arrays"),
            epochs=EPOCHS,
            verbose=0,
            callbacks=[Signal(), *others(), kdist.callbacks.BackupAndRestore(folder), kdist.callbacks.Preemption()],
        )
    assert train("arrays", folder, others(), save_freq="epoch") == expected


def told_to_go_with_a_model_checkpoint() -> None:
    folder = Path(shared_folder())
    with kdist.scope():
        model = mlp()
        model.compile("sgd", "mse")
        preemption = kdist.callbacks.Preemption()
        preemption.set_model(model)
        if kdist.is_chief():
            with pytest.raises(ScopeError, match="needs a callback that saves"):
                preemption.on_train_begin()
    checkpoint = keras.callbacks.ModelCheckpoint(str(folder / "{epoch}-{val_loss:.2f}.keras"), save_best_only=True)
    tell = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: os.kill(os.getpid(), signal.SIGTERM) if batch == 1 else None
    )
    with pytest.raises(SystemExit) as left:
        model.fit(**inputs("arrays"), verbose=0, callbacks=[checkpoint, tell, kdist.callbacks.Preemption()])
    assert left.value.code == 75
    if kdist.is_chief():
        assert [each.name for each in folder.iterdir()] == ["1-nan.keras"]
        saved = keras.models.load_model(folder / "1-nan.keras")
        assert int(saved.optimizer.iterations) == int(model.optimizer.iterations)
        folder.joinpath("best.keras").write_text("the best so far")
    kdist.barrier()
    checkpoint = keras.callbacks.ModelCheckpoint(str(folder / "best.keras"), save_best_only=True)
    with pytest.raises(SystemExit):
        model.fit(**inputs("arrays"), verbose=0, callbacks=[checkpoint, tell, kdist.callbacks.Preemption()])
    if kdist.is_chief():
        assert folder.joinpath("best.keras").read_text() == "the best so far"
        assert keras.models.load_model(folder / "best-preempted.keras").built


# Another number of ranks: what one launch leaves another takes up.

FOLDER = "INTERRUPTED_TRAININGS"
TAKEN_UP = ("arrays", "py_dataset", "tf_data", "tf_data_unknown")


def left_for_others() -> None:
    for kind in TAKEN_UP:
        with pytest.raises(Interrupted):
            train(kind, str(Path(os.environ[FOLDER], kind)), [InterruptAt(1, 3)], optimizer=_scheduled, is_small=True)
    with pytest.raises(Interrupted):
        train(
            "arrays", str(Path(os.environ[FOLDER], "compressed")), [InterruptAt(1, 3)], scope=_compressed(), width=260
        )

    with pytest.raises(Interrupted):
        _with_two_optimizers([InterruptAt(1, 3)], save_freq=2)

    for kind in WITH_MICRO_BATCHES:
        folder = str(Path(os.environ[FOLDER], f"{kind}_micro_batches"))
        backup = kdist.callbacks.BackupAndRestore(folder, save_freq=2, delete_checkpoint=False)
        with pytest.raises(Interrupted):
            _with_micro_batches(kind, [InterruptAt(1, 3), backup])


WITH_MICRO_BATCHES = ("arrays", "tf_data", "in_parts")


def _with_micro_batches(kind: str, callbacks: list[Any]) -> dict[str, Any]:
    """Also with slots and a table in parts, of which each number of ranks has its own."""
    fresh()
    in_parts = kind == "in_parts"
    strategy = kdist.AllReduce(shard="optimizer", shard_embeddings=1.0) if in_parts else "auto"
    with kdist.scope(strategy, micro_batches=4):
        model = _with_a_table() if in_parts else mlp()
        model.compile(keras.optimizers.Adam(0.01) if in_parts else _scheduled(), "mse", metrics=["mae"])
        data = _sized("arrays" if in_parts else kind, STEPS * 4 * BATCH - 3)
        history = model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return outcome(model, history)


def _with_a_table() -> keras.Model:
    ids = keras.layers.Lambda(lambda x: keras.ops.cast(7 * keras.ops.abs(x), "int32"), output_shape=(5,))
    layers = [keras.layers.Flatten(), keras.layers.Dense(40, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((5,)), ids, keras.layers.Embedding(41, 4), *layers])
    deterministic_weights(model)
    return model


def _taken_up_with_micro_batches() -> None:
    """As if it had run on this number of ranks from its beginning."""
    for kind in WITH_MICRO_BATCHES:
        expected = _with_micro_batches(kind, [])
        folder = str(Path(os.environ[FOLDER], f"{kind}_micro_batches"))
        backup = kdist.callbacks.BackupAndRestore(folder, save_freq=100, delete_checkpoint=False)
        steps: list[int] = []
        seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, steps=steps: steps.append(batch))
        found = _with_micro_batches(kind, [seen, backup])
        assert steps == [*range(2, STEPS), *range(STEPS)], (kind, steps)
        compare(expected, found)


def _compressed() -> dict[str, Any]:
    return {"strategy": kdist.AllReduce(compression="powersgd", powersgd_rank=1)}


def _scheduled() -> Any:
    return keras.optimizers.SGD(keras.optimizers.schedules.PolynomialDecay(0.1, 1000, 0.0))


class TwoOptimizers(OwnStep):
    """A schedule for each of two weights, as in a GAN; the optimizer of `compile` is not used."""

    def compile(self) -> None:
        super().compile()
        self.of_kernel, self.of_bias = _scheduled(), _scheduled()

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.losses.mean_squared_error(y, self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_weights)
        optimizers = (self.of_kernel, self.of_bias)
        for optimizer, gradient, weight in zip(optimizers, gradients, self.trainable_weights, strict=True):
            optimizer.apply([gradient], [weight])
        return {"loss": loss}


def _with_two_optimizers(callbacks: list[Any], *, save_freq: int) -> TwoOptimizers:
    fresh()
    with kdist.scope():
        model = TwoOptimizers()
        model(np.zeros((1, 5)))
        model.compile()
        folder = str(Path(os.environ[FOLDER], "two_optimizers"))
        backup = kdist.callbacks.BackupAndRestore(folder, save_freq=save_freq, delete_checkpoint=False)
        data = _sized("arrays", STEPS * 2 * BATCH - 3)
        model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=[*callbacks, backup])
    return model


def _two_optimizers_taken_up() -> None:
    """Each schedule goes on at the user's step."""
    before, ranks = 2, kdist.size()
    seen: list[int] = []
    counting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model = _with_two_optimizers([counting], save_freq=100)
    for optimizer in (model.of_kernel, model.of_bias):
        made = optimizer.iterations
        if ranks > 1:
            made = model._kdist.rate_of(optimizer)._user_steps.at(made)
        assert float(made) == (STEPS + 2) * before + len(seen) * ranks, (optimizer.name, float(made))


def taken_up_by_others() -> None:
    """On another number of ranks: the rest of the epoch's samples, each once, but for those of a cut step."""
    before, ranks = 2, kdist.size()
    n = STEPS * before * BATCH - 3
    for kind in TAKEN_UP:
        folder = str(Path(os.environ[FOLDER], kind))
        seen: list[int] = []
        fresh()
        with kdist.scope(), logged() as lines:
            model = mlp()
            model.compile(_scheduled(), "mse")
            data = _sized(kind, n)
            history = model.fit(
                **data,
                epochs=EPOCHS,
                verbose=0,
                callbacks=[
                    keras.callbacks.LambdaCallback(
                        on_train_batch_end=lambda batch, logs, seen=seen: seen.append(batch)
                    ),
                    kdist.callbacks.BackupAndRestore(folder, save_freq=100, delete_checkpoint=False),
                ],
            )
        steps = -(-n // (BATCH * ranks))
        if ranks > 1:
            made = 2 * before // ranks  # 2 steps of 2 batches each were saved
            assert seen == [*range(made, steps), *range(steps)], (kind, seen)
            (rate,) = model._kdist.rates()
            ended = kind == "tf_data_unknown"  # a step that finds the end counts, too: one in each epoch
            made_before = (STEPS + ended + 2) * before
            user_steps = float(rate._user_steps.at(model.optimizer.iterations))
            assert user_steps == made_before + (len(seen) + 2 * ended) * ranks
        else:  # Keras' own data, whose order is another
            assert seen == [*range(steps), *range(steps)]
        assert history.epoch == [0, 1, 2]
        if kdist.is_chief():
            assert "2 rank(s)" in "\n".join(lines), "\n".join(lines)
        kdist.barrier()
    _two_optimizers_taken_up()
    _taken_up_with_micro_batches()
    if ranks > 1:
        _compressed_taken_up_by_others()


def _compressed_taken_up_by_others() -> None:
    """What compression had left out on the ranks that saved, all in all, the chief begins with, and no other rank."""
    folder = str(Path(os.environ[FOLDER], "compressed"))
    saved = CheckpointDirectory(folder).read()[1]["slots"] if kdist.is_chief() else {}
    expected = {name: array.tolist() for name, array in saved.items() if name.startswith("residual/")}
    found: list[dict[str, Any]] = []

    def look(batch: int, logs: Any) -> None:  # before the first step, which makes variables of it
        loaded = model._kdist.reducer._compression._residuals._loaded
        places = {id(variable): place for place, variable in enumerate(model.variables)}
        found.append({f"residual/{places[key]}": each.tolist() for key, each in loaded.items()})

    fresh()
    with kdist.scope(**_compressed()):
        model = network(260)
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae", keras.metrics.R2Score()])
        backup = kdist.callbacks.BackupAndRestore(folder, save_freq=100, delete_checkpoint=False)
        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_begin=look), backup]
        model.fit(**_sized("arrays", STEPS * 2 * BATCH - 3), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    assert found[0] == expected
    assert any(np.any(array) for array in expected.values()) == kdist.is_chief()


def _sized(kind: str, n: int) -> dict[str, Any]:
    generator = np.random.default_rng(5)
    x = generator.normal(size=(n, 5))
    y = x @ generator.normal(size=(5, 2))
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40, seed=7).batch(BATCH)
    return {
        "arrays": lambda: {"x": x, "y": y, "batch_size": BATCH},
        "py_dataset": lambda: {"x": Shuffled(x, y, BATCH), "shuffle": True},
        "tf_data": lambda: {"x": shuffled},
        "tf_data_unknown": lambda: {"x": shuffled.filter(lambda *_: True)},
    }[kind]()


KINDS = (
    "arrays",
    "arrays_steps",
    "tf_data",
    "tf_data_unseeded",
    "tf_data_repeat",
    "tf_data_unknown",
    "py_dataset",
    "py_dataset_workers",
    "py_dataset_by_itself",
    "generator",
)

DAMAGES = {"cut_off": _cut_off, "changed": _flip, "incomplete": _take_away}

CASES = {
    **{
        f"between_epochs_{kind}": functools.partial(between_epochs, kind)
        for kind in ("arrays", "tf_data", "py_dataset")
    },
    **{f"in_an_epoch_{kind}": functools.partial(in_an_epoch, kind) for kind in KINDS},
    **{f"a_step_later_{kind}": functools.partial(resumed, kind, [(1, 4)]) for kind in ("tf_data", "py_dataset")},
    **{
        f"kept_beside_the_model_{n}": functools.partial(what_is_kept_beside_the_model, *kept)
        for n, kept in KEPT.items()
    },
    **{f"the_newest_is_{damage}": functools.partial(the_newest_is_damaged, do) for damage, do in DAMAGES.items()},
    **{
        function.__name__: function
        for function in (
            after_the_last_step_of_unknown_length,
            none_can_be_read,
            another_model,
            a_step_that_updates_what_the_model_does_not_track,
            another_engine,
            scaled_rates_and_schedules,
            several_steps_an_execution,
            kerass_own_in_a_scope_is_ours,
            a_backup_of_kerass_own_is_told_of,
            with_callbacks_of_kdist,
            what_a_callback_takes_from_the_model_when_training_begins,
            an_evaluation_when_a_resumed_epoch_begins,
            stopped_early_stays_stopped,
            deleted_at_the_end,
            a_resumed_fit_that_raises_leaves_no_epoch_behind,
            folds_of_which_some_are_left_out,
            told_to_go_in_an_epoch,
            told_to_go_in_the_last_step_and_between_epochs,
            told_to_go_when_training_ends,
            told_to_go_with_a_model_checkpoint,
            left_for_others,
        )
    },
}

ALONE = {
    name: CASES[name]
    for name in (
        "in_an_epoch_arrays",
        "in_an_epoch_py_dataset",
        "a_step_later_py_dataset",
        "the_newest_is_changed",
        "another_model",
        "a_backup_of_kerass_own_is_told_of",
        "with_callbacks_of_kdist",
        "what_a_callback_takes_from_the_model_when_training_begins",
        "stopped_early_stays_stopped",
        "deleted_at_the_end",
        "folds_of_which_some_are_left_out",
        "told_to_go_in_an_epoch",
        "told_to_go_with_a_model_checkpoint",
    )
} | {
    function.__name__: function
    for function in (
        interrupted_while_it_goes_there,
        taken_up_by_others,
        epochs_that_share_a_pass,
        with_another_batch_size,
    )
}

OTHERS = {"taken_up_by_others": taken_up_by_others}

EVERYTHING = CASES | OTHERS
