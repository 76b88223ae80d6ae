"""Files of a script: exports that are read at once, functions that save, downloads; on all ranks at the same time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.utils import file_utils

import kdist
from tests.training.behaviours import everyone
from tests.training.behaviours_saving import folder
from tests.training.fidelity import BATCH, fresh, mlp, rows


def exported_and_loaded_at_once() -> None:
    """The directory was swapped by a later rank while an earlier one read it."""
    fresh()
    x, _ = rows("even")
    with kdist.scope():
        model = mlp()
        for number in range(12):
            path = folder() / "made_here" / f"exported-{number % 3}"  # the later ones replace another model's
            kdist.barrier()
            model.set_weights([each + 0.01 for each in model.get_weights()])
            model.export(path, verbose=False)
            loaded = tf.saved_model.load(path)
            np.testing.assert_allclose(loaded.serve(x), model(x), rtol=1e-6, atol=1e-6)
    kdist.barrier()  # the other ranks have written
    assert not [each for each in path.parent.iterdir() if each.name.startswith(".")]


def of_a_saved_model(path: Path) -> list[Any]:
    """Returns the weights of `mlp` in a SavedModel, which has them in an order of its own."""
    assert tf.saved_model.load(path) is not None
    saved = tf.train.load_checkpoint(str(path / "variables" / "variables"))
    values = {tuple(shape): saved.get_tensor(name) for name, shape in saved.get_variable_to_shape_map().items()}
    return [values[weight.shape] for weight in mlp().get_weights()]


SAVES: dict[str, tuple[Callable[[Any, Path], Any], Callable[[Path], Any]]] = {
    "keras.saving.save_model": (
        lambda model, path: keras.saving.save_model(model, f"{path}.keras"),
        lambda path: keras.saving.load_model(f"{path}.keras").get_weights(),
    ),
    "keras.models.save_model, unzipped": (
        lambda model, path: keras.models.save_model(model, filepath=path, zipped=False),
        lambda path: keras.saving.load_model(path).get_weights(),
    ),
    "h5": (
        lambda model, path: keras.saving.save_model(model, f"{path}.h5"),
        lambda path: keras.saving.load_model(f"{path}.h5", compile=False).get_weights(),
    ),
    "tf.saved_model.save": (
        lambda model, path: tf.saved_model.save(obj=model, export_dir=path),
        lambda path: of_a_saved_model(path),
    ),
    "model.save": (
        lambda model, path: model.save(f"{path}.keras"),
        lambda path: keras.saving.load_model(f"{path}.keras").get_weights(),
    ),
}


def functions_that_save() -> None:
    """Whole, on all ranks at once, and loaded at once; within a callback by one rank."""
    fresh()
    x, y = rows("even")
    for number, (save, load) in enumerate(SAVES.values()):
        with kdist.scope():
            model = mlp()
            model.compile("sgd", "mse")
            for _ in range(4):
                path = folder() / f"saved-{number}"
                kdist.barrier()
                model.set_weights([each + 0.01 for each in model.get_weights()])
                save(model, path)
                for one, other in zip(load(path), model.get_weights(), strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-6)
            own = folder() / f"in_callback-{number}-of-{kdist.rank()}"
            callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: save(model, own))  # noqa: B023
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[callback])
        kdist.barrier()
        made = [each.name for each in folder().iterdir() if each.name.startswith(f"in_callback-{number}")]
        assert len(made) == 1, made
        assert "-of-0" in made[0]


def a_save_that_does_not_overwrite() -> None:
    """One rank after another: Keras would ask about the file that another rank has just written."""
    fresh()
    ways: dict[str, Callable[[Any, Path], Any]] = {
        "new.keras": lambda model, path: model.save(path, overwrite=False),
        "new.h5": lambda model, path: model.save(path, overwrite=False),
        "new.weights.h5": lambda model, path: model.save_weights(path, overwrite=False),
    }
    with kdist.scope(), mock.patch("keras.src.utils.io_utils.input", side_effect=EOFError, create=True):
        model = mlp()
        for name, save in ways.items():
            path = folder() / name
            for rank in range(kdist.size()):
                if rank == kdist.rank():
                    save(model, path)
                kdist.barrier()
            written = path.stat().st_ino
            assert set(everyone(written)) == {written}
            with pytest.raises(EOFError):
                save(model, path)
            kdist.barrier()


class Breaks(keras.layers.Layer):
    """Cannot be saved, which shows when a part of the file is written."""

    breaks = False

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(1,))

    def call(self, inputs: Any) -> Any:
        return inputs + self.weight

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        if self.breaks:
            raise OSError("no space left")


def a_save_that_fails_leaves_the_old_file() -> None:
    fresh()
    path = folder() / f"fails-{kdist.rank()}.keras"
    with kdist.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2), Breaks()])
        keras.saving.save_model(model, path)
        before = path.read_bytes()
        model.layers[-1].breaks = True
        with pytest.raises(OSError, match="no space left"):
            keras.saving.save_model(model, path)
        assert path.read_bytes() == before
    assert not [each for each in folder().iterdir() if each.name.startswith(f".fails-{kdist.rank()}")]


# Downloads.


class Slowly:
    """Makes downloads and extractions of this process begin when all ranks ask for the file, and take their time.

    Half of a download is written, and the rest a second later. Each is noted.
    """

    def __init__(self, name: str) -> None:
        self._log = folder() / f"{name}.log"
        self._log.touch()
        self._number = 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Replaces Keras' functions before a scope does."""
        before = retrieve, extract = file_utils.urlretrieve, file_utils.extract_archive

        def slow_retrieve(url: str, filename: str, *args: Any) -> None:
            self._begin("download")
            retrieve(url, f"{filename}.whole", *args)
            data = Path(f"{filename}.whole").read_bytes()
            os.remove(f"{filename}.whole")
            with open(filename, "wb") as out:
                out.write(data[: len(data) // 2])
                out.flush()
                time.sleep(1)
                out.write(data[len(data) // 2 :])

        def slow_extract(*args: Any, **kwargs: Any) -> bool:
            self._begin("extract")
            return extract(*args, **kwargs)

        file_utils.urlretrieve, file_utils.extract_archive = slow_retrieve, slow_extract
        try:
            yield
        finally:
            file_utils.urlretrieve, file_utils.extract_archive = before

    def get_file(self, *args: Any, alone: bool = False, **kwargs: Any) -> Path | None:
        """Calls `get_file` on all ranks at once, or on rank 1 alone."""
        self._arrive()
        return None if alone and kdist.rank() != 1 else Path(keras.utils.get_file(*args, **kwargs))

    def times(self, what: str) -> int:
        """Returns how often all ranks did something."""
        kdist.barrier()
        count = self._log.read_text().split().count(what)
        kdist.barrier()
        return count

    def _arrive(self) -> None:
        kdist.barrier()
        self._number += 1
        self._log.with_suffix(f".{self._number}.{kdist.rank()}").touch()

    def _begin(self, what: str) -> None:
        with open(self._log, "a") as file:
            file.write(f"{what} ")
        arrived, deadline = f"{self._log.stem}.{self._number}.*", time.monotonic() + 60
        while len(list(folder().glob(arrived))) < kdist.size() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)  # until they wait


def origin(name: str, write: Callable[[Path], None]) -> str:
    """Returns the address of a file that rank 0 writes."""
    path = folder() / "origins" / name
    if kdist.is_chief():
        path.parent.mkdir(exist_ok=True)
        write(path)
    kdist.barrier()
    return path.as_uri()


def cache(name: str) -> str:
    """Returns a directory for downloads; Keras does not take one that is not there."""
    path = folder() / "caches" / name
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


def a_file_is_downloaded_once() -> None:
    data = bytes(range(256)) * 1000
    digest = hashlib.sha256(data).hexdigest()
    address = origin("data.bin", lambda path: path.write_bytes(data) and None)
    where, slowly = cache("files"), Slowly("file")
    with slowly.opened(), kdist.scope():
        path = slowly.get_file("data.bin", origin=address, file_hash=digest, cache_dir=where)
        assert path.read_bytes() == data
        assert slowly.times("download") == 1
        slowly.get_file("data.bin", origin=address, cache_dir=where)  # it is there
        assert slowly.times("download") == 1
        path = slowly.get_file("data.bin", origin=address, cache_dir=where, force_download=True)
        assert path.read_bytes() == data
        assert slowly.times("download") == 2
        slowly.get_file("alone.bin", origin=address, cache_dir=where, alone=True)  # no message is sent
        assert slowly.times("download") == 3
    assert sorted(each.name for each in path.parent.iterdir()) == ["alone.bin", "data.bin"]
    assert file_utils.urlretrieve.__module__ == "urllib.request"


def archive(kind: str, path: Path, contents: bytes) -> None:
    """Writes an archive of some files; a tar archive keeps their times, which are equal then."""
    source = path.with_suffix(".files")
    (source / "cats").mkdir(parents=True, exist_ok=True)
    for number in range(30):
        (source / "cats" / f"{number}.txt").write_bytes(contents)
        os.utime(source / "cats" / f"{number}.txt", (1, 1))
    if kind == "tar":
        with tarfile.open(path, "w:gz") as tar:
            tar.add(source / "cats", "cats")
    else:
        with zipfile.ZipFile(path, "w") as archived:
            for each in sorted(source.rglob("*.txt")):
                archived.writestr(str(each.relative_to(source)), each.read_bytes())


def an_archive_is_extracted_once() -> None:
    """Files that a rank reads are not written by another."""
    for kind, arguments in {"tar": {"untar": True}, "zip": {"extract": True}}.items():
        contents = f"{kind} ".encode() * 20_000
        address = origin(f"{kind}.archive", lambda path: archive(kind, path, contents))  # noqa: B023
        where, slowly = cache(kind), Slowly(kind)
        with slowly.opened(), kdist.scope():
            for number in range(3):  # Keras extracts it again each time
                path = slowly.get_file("pets", origin=address, cache_dir=where, **arguments)
                files = sorted((path / "cats").iterdir())
                assert len(files) == 30
                assert all(each.read_bytes() == contents for each in files)
                assert slowly.times("download") == 1
                assert slowly.times("extract") == number + 1
        assert sorted(each.name for each in path.parent.iterdir()) == ["pets", "pets_archive"]


def an_archive_is_extracted_while_another_rank_reads() -> None:
    """A rank that comes late extracts it again: files never disappear."""
    contents = b"read " * 20_000
    address = origin("read.archive", lambda path: archive("tar", path, contents))
    with kdist.scope():
        kdist.barrier()
        for _ in range(20):
            path = Path(keras.utils.get_file("pets", origin=address, cache_dir=cache("read"), extract=True))
            files = sorted((path / "cats").iterdir())
            assert [each.read_bytes() == contents for each in files] == [True] * 30


def a_data_set_of_keras() -> None:
    def write(path: Path) -> None:
        names = ("x_train", "y_train", "x_test", "y_test")
        np.savez(path, **{name: np.full((4, 28, 28), number) for number, name in enumerate(names)})

    address, module = origin("mnist.npz", write), keras.src.datasets.mnist
    original = module.get_file

    def from_origin(fname: str, **kwargs: Any) -> Any:
        return original(fname, **{**kwargs, "origin": address, "file_hash": None, "cache_dir": cache("sets")})

    module.get_file = from_origin
    try:
        with kdist.scope():
            (x_train, _), (_, y_test) = keras.datasets.mnist.load_data()
            assert (x_train.max(), y_test.min()) == (0, 3)
            kdist.barrier()
        assert [each.name for each in Path(cache("sets"), "datasets").iterdir()] == ["mnist.npz"]
    finally:
        module.get_file = original


def a_download_that_fails_fails_on_all() -> None:
    address = (folder() / "origins" / "nothing").as_uri()
    where = cache("fails")
    with kdist.scope():
        with pytest.raises(Exception, match="URL fetch failure"):
            keras.utils.get_file("nothing", origin=address, cache_dir=where)
        assert everyone(True) == [True] * kdist.size()
    assert not list(Path(where, "datasets").iterdir())


def an_export_has_no_collectives() -> None:
    """One process serves it: what the layer gathers from the ranks in a step is its own input there."""
    fresh()

    class Centered(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs - kdist.all_reduce(keras.ops.mean(inputs, axis=0), "mean")

    x, y = rows("even")
    with kdist.scope():
        model = keras.Sequential([keras.Input((5,)), Centered(), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=BATCH, verbose=0)
        path = folder() / "centered"
        model.export(path, verbose=False)
        if kdist.is_chief():  # alone
            weights, bias = model.get_weights()
            loaded = tf.saved_model.load(path)
            np.testing.assert_allclose(loaded.serve(x), (x - x.mean(axis=0)) @ weights + bias, rtol=1e-6, atol=1e-6)
        kdist.barrier()


CASES = {
    function.__name__: function
    for function in (
        exported_and_loaded_at_once,
        functions_that_save,
        a_save_that_does_not_overwrite,
        a_save_that_fails_leaves_the_old_file,
        a_file_is_downloaded_once,
        an_archive_is_extracted_once,
        an_archive_is_extracted_while_another_rank_reads,
        a_data_set_of_keras,
        a_download_that_fails_fails_on_all,
        an_export_has_no_collectives,
    )
}
