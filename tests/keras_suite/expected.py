"""Keras' tests that differ on several ranks, each with the reason."""

from __future__ import annotations

REPLACED = "reads private attributes of a callback that kdist replaces by its own"
OWN_FOLDER = "each rank makes a temporary directory of its own, and the chief alone writes"
CHECKPOINT = "all ranks write TensorFlow's checkpoint into the one folder that the test names (docs/saving.md)"
NEEDS_CONFTEST = "imports Keras' conftest.py, which its source distribution lacks: it runs nowhere"
NEEDS_TORCH = "imports PyTorch, which the tests of kdist do not install"
NEEDS_EXPORTERS = "needs ONNX, PyTorch or LiteRT, which the tests of kdist do not install"
IN_XLA = "updates weights in a tf.function(jit_compile=True): XLA cannot compile messages (docs/limits.md)"
OTHER_ROWS = "trains on one batch whose parts have different numbers of rows, which kdist refuses to split"
ONE_FOLDER = "the ranks share a folder, in which each writes, lists or deletes the test's files by itself"
WHOLE_FILES = "a save that fails leaves no file: kdist's are whole (docs/saving.md)"

EXPECTED: dict[str, str] = {
    "backup_and_restore_test.py::BackupAndRestoreCallbackTest::test_backup_corrupted": REPLACED,
    "backup_and_restore_test.py::BackupAndRestoreCallbackTest::test_best_case": REPLACED,
    "csv_logger_test.py": OWN_FOLDER,
    "adapter_test.py": NEEDS_TORCH,
    "dense_test.py::DenseTest::test_quantize_float8": IN_XLA,
    "einsum_dense_test.py::EinsumDenseTest::test_quantize_float8": IN_XLA,
    "export/litert_torch_test.py": NEEDS_EXPORTERS,
    "export/onnx_test.py": NEEDS_EXPORTERS,
    "export/torch_test.py": NEEDS_EXPORTERS,
    "flatten_test.py": NEEDS_CONFTEST,
    "mel_spectrogram_test.py::MelSpectrogramTest::test_mel_spectrogram_basics": OTHER_ROWS,
    "model_checkpoint_test.py::ModelCheckpointTest::test_model_checkpoint_options": OWN_FOLDER,
    "optimizer_test.py::OptimizerTest::test_tf_checkpointing": CHECKPOINT,
    "remote_monitor_test.py": NEEDS_CONFTEST,
    "string_lookup_test.py::StringLookupTest::test_vocabulary_file": ONE_FOLDER,
    "saving_lib_test.py::SavingTest::test_save_model_exception_raised": WHOLE_FILES,
    "swap_ema_weights_test.py::SwapEMAWeightsTest::test_swap_ema_weights_on_epoch": OWN_FOLDER,
    "swap_ema_weights_test.py::SwapEMAWeightsTest::test_swap_ema_weights_with_tf_distribute": OWN_FOLDER,
}
"""Parts of the names of tests, and why these differ."""


def reason(test: str) -> str:
    """Returns why a test differs on several ranks; `""` if it must not."""
    return next((why for part, why in EXPECTED.items() if part in test), "")
