"""Files and weights: written by one rank, whole, whoever asks; set on one rank, taken over by all."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import kdist
from kdist._engine import open_engine
from kdist.checkpoint.storage.files import CheckpointDirectory
from kdist.errors import CheckpointError
from tests.callbacks.full_disk import full_disk
from tests.training.behaviours import assert_equal_everywhere, weights_of
from tests.training.fidelity import BATCH, compare, fresh, mlp, of_the_chief, outcome, rows, size

BOARD = ["board"] if importlib.util.find_spec("tensorboard") else []


def compiled(**kwargs: Any) -> keras.Model:
    model = mlp()
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"], **kwargs)
    return model


def train(model: keras.Model, callbacks: Any, **kwargs: Any) -> keras.callbacks.History:
    x, y = rows("even")
    given = {"batch_size": BATCH, "verbose": 0, "validation_data": (x[:7], y[:7]), **kwargs}
    return model.fit(x, y, callbacks=callbacks, **given)


def shared_folder() -> Path:
    return Path(open_engine(kdist.cluster_info()).broadcast_object(tempfile.mkdtemp() if kdist.is_chief() else None))


def evaluated(model: keras.Model, found: list[Any]) -> None:
    x, y = rows("ragged")
    found.append(model.evaluate(x, y, batch_size=BATCH, verbose=0))
    found.append(float(np.sum(model.predict(x, batch_size=BATCH, verbose=0))))


def writers_of_the_users_own_may_use_all_ranks() -> None:
    """Subclasses of callbacks that write, which evaluate and predict: they run everywhere, and write once."""
    folder, found = shared_folder(), []

    class Board(keras.callbacks.TensorBoard):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            evaluated(self.model, found)
            super().on_epoch_end(epoch, logs)

    class Checkpoint(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            evaluated(self.model, found)
            super().on_epoch_end(epoch, {**logs, "mine": -float(epoch)})

    class Log(keras.callbacks.CSVLogger):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            evaluated(self.model, found)
            super().on_epoch_end(epoch, logs)

    mine = folder / f"rank{kdist.rank()}"
    mine.mkdir()
    checkpoint = Checkpoint(str(mine / "sub" / "best.keras"), monitor="mine", mode="min", save_best_only=True)
    board, log = Board(str(mine / "board")), Log(str(mine / "log.csv"))
    with kdist.scope():
        model = compiled()
        history = train(model, [*([board] if BOARD else []), checkpoint, log], epochs=2)
    assert len(found) == (12 if BOARD else 8)
    assert_equal_everywhere([found, history.history, weights_of(model), checkpoint.best])
    assert checkpoint.best == -1.0
    written = sorted(os.listdir(mine))
    assert written == ([*BOARD, "log.csv", "sub"] if kdist.is_chief() else []), written
    assert (board.log_dir, log.filename) == (str(mine / "board"), str(mine / "log.csv"))
    assert "_save_model" not in vars(checkpoint)


def the_best_is_known_everywhere() -> None:
    """`save_best_only` decides alike, and what it wrote can be read as soon as `fit` has ended."""
    path = shared_folder() / "best.weights.h5"
    checkpoint = keras.callbacks.ModelCheckpoint(str(path), save_best_only=True, save_weights_only=True)
    with kdist.scope():
        model = compiled()
        history = train(model, [checkpoint], epochs=3)
        assert_equal_everywhere(checkpoint.best)
        assert checkpoint.best == min(history.history["val_loss"])
        model.load_weights(path)  # on all ranks, at once
        assert_equal_everywhere(weights_of(model))
        assert os.listdir(path.parent) == [path.name]


def given_on_another_rank_than_the_chief() -> None:
    """Whoever was given a callback alone writes its file."""
    folder, last = shared_folder(), size() - 1
    save = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.save_weights(folder / f"own{kdist.rank()}.weights.h5")
    )
    mine = [
        keras.callbacks.ModelCheckpoint(str(folder / "last.keras")),
        keras.callbacks.CSVLogger(str(folder / "c")),
        save,
    ]
    with kdist.scope():
        model = compiled()
        train(model, mine if kdist.rank() == last else [])
    kdist.barrier()
    assert sorted(os.listdir(folder)) == ["c", "last.keras", f"own{last}.weights.h5"]


def named_after_what_the_chief_alone_knows() -> None:
    """Other ranks write no file, and need no name of it."""
    folder = shared_folder()

    class Chief(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs.update({"mine": 5} if kdist.is_chief() else {})

    with kdist.scope():
        train(compiled(), [Chief(), keras.callbacks.ModelCheckpoint(str(folder / "{epoch}-{mine}.keras"))])
    kdist.barrier()
    assert os.listdir(folder) == ["1-5.keras"]


def a_callback_of_the_users_own_saves() -> None:
    """`model.save` in a callback of all ranks, to one path: once, whole; `model.save` after `fit` too."""
    folder = shared_folder()
    save = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.save(folder / f"{kdist.rank()}.keras"))
    with kdist.scope():
        model = compiled()
        train(model, [save], epochs=2)
        assert os.listdir(folder) == ["0.keras"]
        kdist.barrier()
        for _ in range(5):
            model.save(folder / "same.keras")
            model.save_weights(folder / "same.weights.h5")
            model.export(folder / "exported", verbose=False)
            assert np.array_equal(keras.models.load_model(folder / "same.keras").weights[0], model.weights[0])
        kdist.barrier()
        model.save_weights(folder / "sharded.weights.json", max_shard_size=4e-7)
        kdist.barrier()
        assert not [each for each in os.listdir(folder) if each.startswith(".")], os.listdir(folder)
        assert (folder / "exported" / "saved_model.pb").exists()
        before = weights_of(model)
        train(model, [])
        model.load_weights(folder / "sharded.weights.json")
        assert weights_of(model) == before
        with pytest.raises(Exception, match="nowhere"):
            model.save(folder / "nowhere" / "model.keras")


def a_directory_of_the_chiefs() -> None:
    """Other ranks need not see it: they neither write nor make it."""
    root = Path(tempfile.mkdtemp())  # of each rank's own
    path = root / "chief" if kdist.is_chief() else root / "file" / "in the way"
    if not kdist.is_chief():
        (root / "file").write_text("not a directory: not even root makes one in it")
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(path / "m" / "{epoch}.keras")),
        *([keras.callbacks.TensorBoard(str(path / "board"))] if BOARD else []),
        keras.callbacks.CSVLogger(str(path.parent / "log.csv") if kdist.is_chief() else str(path / "log.csv")),
        kdist.callbacks.BackupAndRestore(path / "backup", delete_checkpoint=False),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.save(str(path / "own.keras"))),
    ]
    with kdist.scope():
        model = compiled()
        train(model, callbacks)
    found = sorted(os.listdir(path)) if kdist.is_chief() else sorted(os.listdir(root))
    assert found == (["backup", *BOARD, "m", "own.keras"] if kdist.is_chief() else ["file"]), found


def a_full_disk() -> None:
    """A clear error, what was there stays, and nothing half is left; within `fit`: see interrupted_training.py."""
    with kdist.scope():
        model = compiled()
        train(model, [])
    if kdist.is_chief():
        folder = Path(tempfile.mkdtemp())
        names = ["model.keras", "model.weights.h5"]
        model.save(folder / names[0])
        model.save_weights(folder / names[1])
        before = [(folder / name).read_bytes() for name in names]
        backup = CheckpointDirectory(folder / "backup")
        backup.write({"part": {"number": 1, "a": np.zeros(10)}})
        with full_disk():
            with pytest.raises(CheckpointError, match=r"cannot be written.*File too large"):
                backup.write({"part": {"number": 2, "a": np.zeros(10)}})
            for name, save in zip(names, (model.save, model.save_weights), strict=True):
                with pytest.raises(OSError, match=r"(?i)too large|errno = 27"):
                    save(folder / name)
        assert backup.read()[1]["part"]["number"] == 1
        assert os.listdir(folder / "backup") == ["checkpoint-00000001"]
        assert [(folder / name).read_bytes() for name in names] == before
        assert sorted(os.listdir(folder)) == ["backup", *names]
    kdist.barrier()


def weights_set_on_one_rank() -> None:
    """By a callback, within an epoch, at its end, at the end of training; between two calls of train_on_batch."""
    x, y = rows("even")
    with kdist.scope(scale_lr=None):
        model = compiled()  # traced once
    for moment in ("on_train_batch_end", "on_epoch_end", "on_train_end"):
        for rank in range(size()):

            class Restores(keras.callbacks.Callback):
                def _restore(self, *_: Any, rank: int = rank, **__: Any) -> None:
                    if kdist.rank() == rank:
                        self.model.set_weights([np.full(v.shape, 0.5) for v in self.model.weights])

            setattr(Restores, moment, Restores._restore)
            train(model, [Restores()])
            assert_equal_everywhere(weights_of(model))
            if moment != "on_train_batch_end":
                assert all(np.all(np.asarray(v) == 0.5) for v in model.weights)

    def script(batch: int) -> dict[str, Any]:
        model = compiled()
        for step in range(3):
            model.train_on_batch(x[:8], y[:8])
            if step == 1 and (batch != BATCH or kdist.is_chief()):
                model.set_weights([np.full(v.shape, 0.25) for v in model.weights])
        return outcome(model)

    plain = of_the_chief(lambda: script(0))
    fresh()
    with kdist.scope(scale_lr=None):
        ours = script(BATCH)
    compare(plain, ours)


def fit_of_the_models_own() -> None:
    """It passes on callbacks of its own, or a list of its own, or takes none: kdist's are there all the same."""
    told: list[Any] = []

    class Passes(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def fit(self, *args: Any, **kwargs: Any) -> Any:
            noted = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: told.append(epoch))
            return super().fit(*args, callbacks=[noted], verbose=0, **kwargs)

    class PassesList(Passes):
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            noted = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: told.append(epoch))
            container = keras.callbacks.CallbackList(
                [noted], add_history=True, model=self, epochs=1, steps=3, verbose=0
            )
            return keras.Model.fit(self, *args, callbacks=container, verbose=0, **kwargs)

    class TakesNone(Passes):
        def fit(self, x: Any, y: Any, batch_size: int, validation_data: Any = None) -> Any:
            told.append(0)
            return keras.Model.fit(self, x, y, batch_size=batch_size, verbose=0)

    x, y = rows("even")
    for cls in (Passes, PassesList, TakesNone):
        told.clear()
        with kdist.scope():
            model = cls()
            model.compile("sgd", "mse")
            history = model.fit(x, y, batch_size=BATCH, validation_data=(x[:5], y[:5]))
        assert told == [0]
        assert_equal_everywhere([weights_of(model), history.history])


def weights_of_an_average() -> None:
    """SwapEMAWeights, with what is saved in between, as in one process."""
    folder = shared_folder()

    def script(batch: int) -> dict[str, Any]:
        x, y = rows("ragged")
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9), "mse")
        # In the plain run each process writes its own.
        path = str(folder / (f"{kdist.rank()}.weights.h5" if batch != BATCH else "ours.weights.h5"))
        history = model.fit(
            x,
            y,
            batch_size=batch,
            epochs=3,
            shuffle=False,
            verbose=0,
            validation_data=(x, y),
            callbacks=[
                keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
                keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
            ],
        )
        saved = mlp()
        saved.load_weights(path)
        return outcome(model, history, saved=[np.asarray(v) for v in saved.weights])

    fresh()
    plain = script(size() * BATCH)
    fresh()
    with kdist.scope(scale_lr=None):
        ours = script(BATCH)
    compare(plain, ours)


CASES = {
    function.__name__: function
    for function in (
        writers_of_the_users_own_may_use_all_ranks,
        the_best_is_known_everywhere,
        given_on_another_rank_than_the_chief,
        named_after_what_the_chief_alone_knows,
        a_callback_of_the_users_own_saves,
        a_directory_of_the_chiefs,
        a_full_disk,
        weights_set_on_one_rank,
        fit_of_the_models_own,
        weights_of_an_average,
    )
}
