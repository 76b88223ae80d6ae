"""The parts of the suite for GPUs: which cases run on which jobs, on a machine with so many GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tests.helpers.jobs import Job, job
from tests.training.covering import COVERING

TARGET = ",".join(
    (
        "tests.training.all_cases:CASES",
        "tests.callbacks.cases_resume:EVERYTHING",
        "tests.callbacks.cases_steps:CASES",
        "tests.engines.conformance",
        *(f"tests.gpu.cases:{each}" for each in ("CASES", "ALONE", "ON_GPUS", "A_GPU_EACH")),
    )
)
GIVEN = "tests.gpu.cases:engine"

ALONE = (
    *COVERING,
    "mixed_precision_scales_as_one",
    "mixed_bfloat16",
    "float32_as_one_process",
    "steps_take_as_long_as_those_of_plain_keras",
)

TOGETHER = (
    "sgd-even-arrays",
    "momentum-ragged-arrays",  # in the scope, fused
    "adam-few-tf_data",
    # Not of unknown length: plain Keras then counts a step too many an epoch, but not with XLA, which it uses on a GPU.
    "lamb-ragged-tf_data",
    "float32_as_one_process",
    "weights_and_slots_are_on_the_device",
    "embeddings_are_equal_to_the_bit_on_all_ranks",
    # XLA.
    "jit_compile",
    "jit_compile_is_off_where_messages_are_sent_before",
    # 16 bits: one rank overflows.
    "loss_scale",
    "mixed_precision_scales_as_one",
    "mixed_bfloat16",
    "gradients_of_16_bits",
    # Messages before the update, and what is summed beside gradients.
    "gradient_accumulation",
    "masked_sequences",
    "synchronized_batch_normalization",
    "losses_of_whole_batches",
    "exact_metrics",
    "two_optimizers",
    "predictions_of_a_dataset",
    "a_nan_of_one_rank_is_raised_on_all",
    "skipped_steps_are_as_if_they_had_not_been",
    "overflow_is_the_loss_scales_own_affair",
)

# Eager tensors and those of graphs are on the GPU wherever it has a kernel.
MESSAGES = (
    "case_allreduce_sums_every_dtype_and_shape",
    "case_allreduce_sums_halves_in_float32",
    "case_allreduce_is_equal_to_the_bit_on_all_ranks_and_every_time",
    "case_allreduce_takes_variables",
    "case_allreduce_takes_slices_among_tensors",
    "case_allgather_takes_any_mixture",
    "case_broadcast_keeps_every_bit",
    "case_inputs_are_left_alone_and_results_are_the_callers_own",
    "case_results_stay_when_the_same_message_is_sent_again",
    "case_collectives_run_in_program_order",
)

RESUMED = ("in_an_epoch_arrays", "in_an_epoch_tf_data", "told_to_go_in_an_epoch")
DETERMINISTIC = {"TF_DETERMINISTIC_OPS": "1"}  # they compare bits

ON_GPUS = ("memory_grows",)
A_GPU_EACH = ("each_rank_has_its_own_gpu", "nccl_carries_gradients")

ENGINES = ("mpi", "collective", "horovod over gloo")
OVER_NCCL = ("collective", "horovod over gloo")


@dataclasses.dataclass(frozen=True)
class Part:
    """Some cases on a job.

    Attributes:
        title: str, the first cell of their rows.
        column: str, what the job is called.
        on: `Job`.
        names: tuple of str, the cases.
        env: mapping, environment variables on top.
    """

    title: str
    column: str
    on: Job
    names: tuple[str, ...]
    env: Mapping[str, str]


def parts(
    gpus: Sequence[str], *, has_horovod: bool = True, horovod_has_nccl: bool = False, ranks: int = 2
) -> list[Part]:
    """Returns what can run on a machine.

    Args:
        gpus: sequence of str, its GPUs as `CUDA_VISIBLE_DEVICES` has them; none for CPUs alone.
        has_horovod: bool, whether Horovod is installed.
        horovod_has_nccl: bool, whether it was built with NCCL.
        ranks: int, how many share a device.
    """
    # Without the 10 bits of TF32, which products in float32 would have.
    shown = {"CUDA_VISIBLE_DEVICES": gpus[0] if gpus else "-1", "NVIDIA_TF32_OVERRIDE": "0"}
    device = "a GPU" if gpus else "CPUs"
    found = [Part(f"one rank on {device}", "one rank", Job("mpirun", 1), ALONE, shown)]
    for engine in (each for each in ENGINES if has_horovod or "horovod" not in each):
        title, column, on = f"ranks share {device}", f"{engine}, {ranks} ranks", job(engine, ranks)
        placed = ON_GPUS if gpus else ()
        found.append(Part(title, column, on, (*placed, *TOGETHER, *MESSAGES), shown))
        found.append(Part(f"{title}, resumed", column, on, RESUMED, {**shown, **DETERMINISTIC}))
    if len(gpus) > 1:
        each = {**shown, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        for engine in OVER_NCCL if has_horovod and horovod_has_nccl else OVER_NCCL[:1]:
            names = (*ON_GPUS, *A_GPU_EACH, *TOGETHER, *MESSAGES)
            found.append(Part("a GPU each", f"{engine}, {len(gpus)} ranks", job(engine, len(gpus)), names, each))
    return found
