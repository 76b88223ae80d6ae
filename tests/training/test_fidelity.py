"""N ranks against one process: most features on 2 ranks, the others on 3, and each size with each kind of input.

Everything on every number of ranks, as a table: `python -m tests.training.full`.
"""

import itertools

import pytest

from tests.helpers import spmd
from tests.helpers.jobs import job as make_job
from tests.training.fidelity import KINDS, OPTIMIZERS, SHAPES

FEATURES = "tests.training.features:FEATURES"

# Where a third rank makes a difference: what two can share out evenly by luck, and denominators of their own. On two
# ranks they run by the full command.
ON_THREE = (
    "sample_weight",
    "steps_per_epoch_continues",
    "loss_reductions",
    "gradient_accumulation",
    "predictions_of_a_dataset",
    "metrics_of_whole_batches",
    "counters_of_steps_of_static_shape",
)

# What engines could do differently: kinds of tensors, order and number of messages. They take turns at it; the full
# command runs all on each. Horovod over MPI is the same engine as over Gloo, and its busy waits are slow where ranks
# share cores.
ON_COLLECTIVES = (
    "jit_compile",
    "synchronized_batch_normalization",
    "two_optimizers",
    "predictions_that_are_no_plain_arrays",
    "gradients_of_16_bits",
)
ON_HOROVOD = ("mixed_precision_scales_as_one", "losses_of_several_outputs", "losses_by_hand_behind_messages")

# Embedding tables in parts, and slots of one: what depends on the number of ranks.
TABLES = {
    "initial_values": "tests.training.tables",
    "ranks_without_rows": "tests.training.tables",
    "sparse_gradients": "tests.training.sharded",
}
TARGET = ",".join(["tests.training.all_cases:CASES", *(f"{module}:{name}" for name, module in TABLES.items())])

ELSEWHERE = (*ON_THREE, *ON_COLLECTIVES, *ON_HOROVOD)

# Slow ones that resemble another feature: by the full command.
SLOW = (
    "a_loop_after_the_scope",
    "a_loop_between_two_fits",
    "a_loop_on_rows_of_each_rank",
    "a_loop_on_the_same_rows",
    "a_loop_that_calls_the_models_own_steps",
    "a_loop_with_an_optimizer_made_before_the_scope",
    "a_loop_with_an_optimizer_that_clips_by_itself",
    "a_loop_with_sparse_gradients",
    "a_loop_with_sparse_gradients_on_the_same_rows",
    "a_loop_with_two_optimizers",
    "a_loop_with_what_was_made_before_the_scope",
    "a_rank_whose_gradient_is_not_finite_spoils_nothing_that_is_kept",
    "accumulated_sums_are_whole_after_all_that_may_happen",
    "an_optimizer_that_clips_by_hand",
    "automatic_names_are_those_of_plain_keras",
    "compressed_gradients_beside_other_features",
    "counters_in_eager_steps",
    "counters_in_evaluations_and_predictions",
    "counters_in_parts_of_variables",
    "counters_need_no_aggregation",
    "counters_of_ranks_that_train_by_themselves",
    "counters_where_ranks_have_shapes_of_their_own",
    "ctc_losses_that_a_layer_adds",
    "custom_train_step_that_returns_some_metrics",
    "custom_train_step_with_own_logs",
    "float8_layers",
    "functions_of_other_tables_on_each_rank_are_refused",
    "generators_of_sparse_matrices",
    "gradients_that_a_step_uses_in_other_ways",
    "gradients_travel_in_each_step_if_someone_looks",
    "gradients_travel_with_their_update",
    "grain_datasets",
    "jit_compile_is_off_where_messages_are_sent_before",
    "jit_compile_of_a_recurrent_model",
    "kinds_of_arrays",
    "layers_that_relate_rows_are_named",
    "losses_by_hand_in_functions_of_networks",
    "losses_by_hand_in_functions_that_act",
    "losses_of_each_row_that_relate_rows",
    "losses_of_padded_sequences",
    "losses_of_whole_batches",
    "losses_that_leave_out_a_class",
    "losses_that_relate_rows_behind_other_layers",
    "losses_whose_call_is_the_instances_own",
    "masked_losses_of_whole_batches",
    "means_sums_and_what_is_of_them_that_layers_add_to_full_batches",
    "means_that_a_step_differentiates",
    "metrics_of_whole_batches_on_batches",
    "micro_batches_of_several_epochs_in_a_pass",
    "micro_batches_of_sparse_ragged_and_padded_rows",
    "mixed_bfloat16",
    "more_functions_of_means_and_sums_that_a_step_differentiates",
    "more_losses_by_hand_in_functions",
    "more_losses_that_relate_rows_that_a_step_differentiates",
    "more_sums_that_a_step_differentiates",
    "numpy_in_eager_steps",
    "one_of_the_ranks_that_train_by_themselves_stops",
    "other_values_that_relate_rows_for_compiled_losses_and_metrics",
    "outputs_without_rows",
    "predictions_of_a_model_that_was_never_compiled",
    "predictions_of_several_rows_a_sample",
    "ranks_that_train_by_themselves",
    "ranks_that_train_by_themselves_end_alike",
    "sequences_of_unknown_length",
    "several_outputs",
    "split_batches",
    "split_batches_of_other_sizes",
    "sums_beside_what_keras_computes",
    "sums_by_hand_in_other_steps",
    "temporal_classification",
    "used_in_the_next_scope",
    "validation_data_generator",
    "validation_in_larger_batches",
    "validation_py_dataset_and_batch_size",
    "weighted_losses_of_whole_batches",
    "weighted_pairs_of_rows_for_compiled_losses",
    "weights_loaded_by_the_chief_as_an_epoch_begins",
    "weights_that_a_rank_loads_win_over_an_average",
    "what_is_left_out_is_not_kept_while_the_loss_scale_changes",
    "what_no_rule_can_merge_is_told_of",
)

CELLS = [
    *((("mpi", 2), name) for name in spmd.names(FEATURES) if name not in SLOW + ELSEWHERE),
    *((("mpi", 3), name) for name in ON_THREE),
    *((("mpi", 3), name) for name in TABLES),
    (("collective", 2), "ranks_without_rows"),
    (("mpi", 2), "random_programs_0"),
    (("mpi", 2), "random_losses_0"),
    (("mpi", 2), "random_steps_2"),
    *((("collective", 2), name) for name in ON_COLLECTIVES),
    *((("horovod over gloo", 2), name) for name in ON_HOROVOD),
    # No input knows of optimizers: they take turns. No engine knows of either; of few rows a third rank has none, and
    # the two others have one each.
    *(
        (("mpi", 3 if shape == "few" else 2), f"{optimizer}-{shape}-{kind}")
        for (shape, kind), optimizer in zip(itertools.product(SHAPES, KINDS), itertools.cycle(OPTIMIZERS), strict=False)
    ),
]


@pytest.fixture(scope="module")
def launches(request):
    """Launches each job with the cases that are asked for, a batch at a time."""
    done = {}

    def launched(job, case):
        only = spmd.batch_with(case, spmd.selected(request, job=job))
        if (job, only[0]) not in done:
            done[job, only[0]] = make_job(*job).run(TARGET, only=only, timeout=570)
        return done[job, only[0]]

    return launched


@pytest.mark.parametrize(
    ("job", "case"), CELLS, ids=[f"{engine} on {ranks}: {name}" for (engine, ranks), name in CELLS]
)
def test_case(launches, job, case):
    launches(job, case).check(case)
