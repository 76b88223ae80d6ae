"""What N ranks have saved is plain Keras' again, in a process that cannot import kdist."""

import sys
import textwrap

import pytest

from tests.helpers import spmd
from tests.training import behaviours_saving as cases

TARGET = f"{cases.__name__}:CASES"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def launched(request, folder):
    only = spmd.selected(request) or ["saved_on_the_chief_and_on_all"]
    return spmd.run(TARGET, 2, only=only, env={cases.FOLDER: str(folder)}, timeout=240)


@pytest.mark.parametrize("case", spmd.names(TARGET))
def test_case(launched, case):
    launched.check(case)


PLAIN = """
    import sys
    sys.modules["kdist"] = None  # from here on `import kdist` raises
    from pathlib import Path
    import keras, numpy as np, tensorflow as tf

    folder = Path(sys.argv[1])
    classes = {"sgd": "SGD", "adam": "Adam", "schedule": "SGD", "mixed": "LossScaleOptimizer"}

    def check(path, name, is_final, goes_on=True):
        model = keras.models.load_model(path)
        saved = np.load(folder / f"{name}.npz")
        optimizer = model.optimizer
        assert type(optimizer).__module__.startswith("keras."), type(optimizer)
        assert type(optimizer).__name__ == classes[name], type(optimizer)
        if name == "schedule":
            assert type(optimizer._learning_rate) is keras.optimizers.schedules.ExponentialDecay
            assert optimizer._learning_rate.initial_learning_rate == 0.05
        else:
            np.testing.assert_allclose(float(optimizer.learning_rate), 0.05, rtol=1e-6)
        assert int(optimizer.iterations) > 0
        if is_final:
            for number, value in enumerate(model.weights):
                np.testing.assert_array_equal(np.asarray(value), saved[f"arr_{number}"])
        if not goes_on:
            return model
        x, y = saved["x"], saved["y"]
        before = model.evaluate(x, y, verbose=0)[0]
        if is_final:
            np.testing.assert_allclose(before, saved["loss"], rtol=1e-5)
        steps, weights = int(optimizer.iterations), model.get_weights()
        model.fit(x, y, epochs=2, batch_size=8, verbose=0)
        assert int(model.optimizer.iterations) == steps + 2 * -(-len(x) // 8)
        assert all((old != new).any() for old, new in zip(weights, model.get_weights()))
        return model

    for name in classes:
        check(folder / f"{name}-warming.keras", name, False)
        model = check(folder / f"{name}-chief.keras", name, True)
        check(folder / f"{name}-rank0.keras", name, True, goes_on=False)
        check(folder / f"{name}-rank1.keras", name, True, goes_on=False)
        for who in ("chief", "rank0", "rank1"):
            model.load_weights(folder / f"{name}-{who}.weights.h5")
            for number, value in enumerate(model.weights):
                np.testing.assert_array_equal(np.asarray(value), np.load(folder / f"{name}.npz")[f"arr_{number}"])
    legacy = keras.models.load_model(folder / "adam-chief.h5", compile=False)  # Keras cannot read "mse" back from it
    for number, value in enumerate(legacy.weights):
        np.testing.assert_array_equal(np.asarray(value), np.load(folder / "adam.npz")[f"arr_{number}"])
    exported = tf.saved_model.load(str(folder / "adam-exported"))
    saved = np.load(folder / "adam.npz")
    served = exported.serve(tf.constant(saved["x"], tf.float32))
    rounding = 1e-6 * abs(saved["predicted"]).max()  # of sums of terms so large; ranks predicted fewer rows at a time
    np.testing.assert_allclose(served, saved["predicted"], rtol=1e-5, atol=rounding)
    assert not [name for name in sys.modules if name.startswith(("kdist.", "mpi4py"))]
    print("all is well")
"""


def test_what_was_saved_is_plain_keras(launched, folder):
    launched.check("saved_on_the_chief_and_on_all")
    done = spmd.execute(
        [sys.executable, "-c", textwrap.dedent(PLAIN), str(folder)], env=spmd.RANK_ENVIRONMENT, timeout=120, cwd=folder
    )
    assert "all is well" in done.output, done.output[-4000:]
