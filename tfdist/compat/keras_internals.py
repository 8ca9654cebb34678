"""The private names of Keras and TensorFlow that tfdist leans on.

A release may move them: tests/architecture/test_keras_internals.py says which.
"""

# backup/data_position.py
KERAS_LOGS = "_get_metrics_result_or_logs"
KERAS_ENUMERATE = "_enumerate_iterator"
KERAS_GET_ITERATOR = "_get_iterator"
KERAS_INITIAL_EPOCH = "_initial_epoch"
KERAS_STEPS_SEEN = "_steps_seen"
KERAS_ITERATORS = ("_current_iterator", "_epoch_iterator")

# backup/unsaved_randomness.py
TF_PARALLEL = "_num_parallel_calls"
TF_ORDERED = "_deterministic"
TF_TRACED = "_list_all_concrete_functions"

# collectives/communicator.py
TF_CROSS_DEVICE_OPS = "_cross_device_ops"
TF_LAUNCHERS = "_launchers"

# compat/optimizer_search.py
KERAS_STRATEGY = "_distribution_strategy"

# compat/unsupported.py
KERAS_REDUCTION = "_all_reduce_sum_gradients"
KERAS_ADAPTER = "data_adapter"
KERAS_SELF_FEEDING = ("PyDatasetAdapter", "GeneratorDataAdapter", "TorchDataLoaderAdapter", "GrainDatasetAdapter")

# data/arrays.py
TF_INPUTS = "_inputs"
TF_FUNCTIONS = "_functions"
TF_COUNT = "_count"
TF_BATCH_SIZE = "_batch_size"

# data/random_state.py
KERAS_SEED_STATE = "seed_generator_state"
TF_GENERATOR_STATE = "StateVar"
KERAS_EPOCH_END = "on_epoch_end"

# gradients/update.py
KERAS_UPDATE = "_backend_apply_gradients"
KERAS_CLIP = "_clip_gradients"
KERAS_ACCUMULATORS = "_accumulated_gradients"
KERAS_MOVE_AVERAGES = "_update_model_variables_moving_average"
KERAS_OVERWRITE = "_overwrite_model_variables_with_average_value"

# parameter_server/scheduler.py
# The public `schedule` takes no Python functions, in which alone it is known who runs them how often.
TF_CLUSTER = "_cluster"

# parameter_server/strategy.py
KERAS_OPTIMIZER_SCALARS = ("iteration", "learning_rate")
KERAS_PREDICT_STEP = "one_step_on_data_distributed"

# parameter_server/worker_step.py
KERAS_ITERATIONS = "_iterations"
KERAS_UPDATE_STEP = "update_step"
KERAS_VALUE = "_value"
KERAS_WEIGHT_DECAY = "_apply_weight_decay"

# replicas/integer_weights.py
TF_FUNCTION = "_get_function"

# replicas/random_seeds.py
KERAS_GLOBAL_GENERATOR = "global_seed_generator"
TF_GLOBAL_SEED = "_seed"
TF_GRAPH_SEED = "seed"
TF_OUTER_GRAPH = "outer_graph"

# step/execution.py
KERAS_MAKE_FUNCTION = "_make_function"

# step/losses.py
KERAS_ADDED_LOSS = "_aggregate_additional_loss"
KERAS_LOSS_TRACKER = "_loss_tracker"
KERAS_COMPILED_LOSS = "_compile_loss"
KERAS_LOSSES = "_flat_losses"
KERAS_MASK = "_keras_mask"

# step/model_building.py
KERAS_BUILD = "_maybe_symbolic_build"
KERAS_BUILD_BY_CALL = "_symbolic_build"
KERAS_DATA = "_distributed_dataset"
KERAS_COMPILED = ("_compile_metrics", "_compile_loss")

# step/synchronized_norm.py
KERAS_MOMENTS = "_moments"

# strategies/base.py
KERAS_STEP = "one_step_on_data"
KERAS_PREDICT = "one_step_on_data_distributed"
KERAS_APPLY = "_distributed_tf_update_step"
KERAS_SEED_VARIABLE = "seed_generator_state"
KERAS_ACCUMULATOR_VARIABLE = "gradient_accumulator"
TF_SERVES = "_std_server_started"

# strategies/distributed_data.py
KERAS_PREDICT_DATA = "get_data"

# training/arguments.py
KERAS_BATCH_SIZE = 32  # where none is given

# training/consistency.py
TF_SHUFFLES = "_ShuffleDataset"
TF_SEEDS = ("_seed", "_seed2")
