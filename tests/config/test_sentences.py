"""Each fault of a configuration is one sentence, whose words are those of this table; the same faults of a whole command: `tests/commands`."""

from __future__ import annotations

import pytest

from tfdist.config import flags
from tfdist.errors import BackupError, ClusterError, ConfigError, DataError

# Fields (or flags, with their dashes) that a run of 32 examples a batch sets -> what the one fault says of them.
SENTENCES = r"""
# Flags
optimizer.rho=0.9 -> optimizer 'adam' takes no 'rho', which is an option of adadelta, rmsprop.
optimizer.options.rho=0.9 -> --config.optimizer.options.rho: optimizer 'adam' takes no 'options'
optimizer.beta_1.x=3 -> unknown config field 'x'. It has no fields.
optimizer.=3 -> optimizer 'adam' takes no ''
--noconfig.optimizer.beta_1 -> only a field that is true or false can be turned off
optimizer.beta1=3 -> optimizer 'adam' takes no 'beta1'; did you mean 'beta_1'? It takes: beta_1,
optimiser.momentum=3 -> unknown config field 'optimiser'; did you mean 'optimizer'?
=3 -> unknown config field ''
--noconfig.bogus -> --noconfig.bogus: unknown config field 'bogus'
--noconfig.epochs -> --noconfig.epochs: only a field that is true or false can be turned off
--noconfig.deterministic=1 -> without a value
optimizer=sgd -> this is a group of fields; set one of them, such as --config.optimizer.name=...
task_options=x -> this is a group of fields; set one of them, such as --config.task_options.filters
epochs=many -> --config.epochs: expected a whole number. Received: 'many'.
epochs= -> --config.epochs: expected a whole number. Received: ''.
epochs=1.5 -> expected a whole number. Received: '1.5'.
learning_rate=fast -> --config.learning_rate: expected a number. Received: 'fast'.
deterministic=maybe -> --config.deterministic: expected true or false. Received: 'maybe'.
epochs=1e3 -> expected a whole number. Received: '1e3'.
epochs=0x10 -> expected a whole number. Received: '0x10'.
seed=99999999999999999999 -> seed must be 0 to 2147483647. Received: 99999999999999999999.
deterministic= -> expected true or false. Received: ''.
.x=1 -> --config..x: unknown config field ''
epochs[0]=1 -> unknown config field 'epochs[0]'; did you mean 'epochs'?
epochs -> --config.epochs has no value; write --config.epochs=VALUE.
--workdir -> --workdir has no value; write --workdir=VALUE.
--bogus=1 -> unknown flag --bogus
--epochs=3 -> unknown flag --epochs; did you mean '--config.epochs'?
---config.epochs=3 -> unknown flag ---config.epochs; did you mean '--config.epochs'?
--undefok=epoch -> --undefok is not supported, as it hides misspelled flags

# Fields
strategy.name=miror -> unknown strategy 'miror'; did you mean 'mirrored'?
strategy.transport=grcp -> unknown strategy.transport 'grcp'; did you mean 'grpc'?
backup.save_freq=batch -> must be 'epoch', 'never' or a number of steps, 1 or more. Received: 'batch'.
backup.save_freq=0 -> 1 or more. Received: '0'.
backup.save_every_seconds=nan -> must be 0 (off) to 1000000000. Received: nan.
backup.keep=0 -> backup.keep must be 1 to 2147483647. Received: 0.
monitoring.update_freq=0 -> monitoring.update_freq must be a number of steps from 1, 'batch' or
monitoring.profile_steps=25:20 -> monitoring.profile_steps must be the first and the last step, such as '20:25', or one step from 1. Received: '25:20'.
validation_freq=0 -> validation_freq must be 1 to 2147483647. Received: 0.
nan_policy=skp -> unknown nan_policy 'skp'; did you mean 'skip'? Known: ignore, skip, stop.
nan_policy=skip & strategy.name=parameter_server & cluster.workers=2 & cluster.ps=1 -> nan_policy 'skip' is not possible with parameter_server, whose workers update variables
max_restarts=-1 -> max_restarts must be 0 to 2147483647. Received: -1.
strategy.bucket_bytes=-1 -> strategy.bucket_bytes must be 0 (off) to 1099511627776. Received: -1.
strategy.name=one_device & strategy.shard_optimizer=True -> strategy.shard_optimizer is not possible with one_device, because it is for mirrored and multi_worker_mirrored; leave it out.
strategy.name=mirrored & strategy.sync_every=5 -> strategy.sync_every is not possible with mirrored, because it is for multi_worker_mirrored; leave it out.
strategy.name=multi_worker_mirrored & strategy.sync_every=5 & strategy.devices=2 -> strategy.sync_every is not possible with strategy.devices='2', because a worker
strategy.name=multi_worker_mirrored & strategy.sync_every=5 & strategy.shard_optimizer=True -> strategy.sync_every is not possible with strategy.shard_optimizer, because each worker updates all weights by itself; leave one of them out.
strategy.name=mirrored & strategy.batch_shares=by_speed -> strategy.batch_shares=by_speed is not possible with mirrored, because it is for multi_worker_mirrored
strategy.name=multi_worker_mirrored & strategy.batch_shares=by_speed & strategy.devices=2 -> strategy.batch_shares=by_speed is not possible with strategy.devices='2', because a worker
strategy.name=multi_worker_mirrored & strategy.batch_shares=by_speed & deterministic=True -> strategy.batch_shares=by_speed is not possible with deterministic operations, because TensorFlow
strategy.name=parameter_server & strategy.features=json:F & cluster.workers=2 & cluster.ps=1 -> strategy.features is not possible with parameter_server, whose workers do not wait
strategy.outer.momentum=0.9 -> strategy.outer is not possible with strategy.sync_every=0, because it needs the number of updates between two
strategy.name=multi_worker_mirrored & strategy.sync_every=10,5 -> strategy.sync_every must be a number of updates, or a list such as 10,1000:50
strategy.name=multi_worker_mirrored & strategy.sync_every=10,100:5,50:6 -> strategy.sync_every: the updates before the colons must rise
strategy.name=mirrored & strategy.weights_dtype=bfloat16 -> strategy.weights_dtype=bfloat16 is not possible with strategy.shard_optimizer=False, because workers then send no
strategy.timeout_seconds=nan -> strategy.timeout_seconds must be 0 (off) to 1000000000. Received: nan.
strategy.name=mirrored & strategy.devices=0 -> 1 to 256 virtual CPUs, or device names. Received: 0.
strategy.name=mirrored & strategy.devices=257 -> 1 to 256 virtual CPUs, or device names. Received: 257.
strategy.name=multi_worker_mirrored & strategy.devices=CPU:0,cpu:0 -> strategy.devices names a device twice
strategy.replicas=4 -> strategy.replicas=4 is not possible with one_device, which has no number of replicas
strategy.name=tpu & strategy.replicas=4 -> with tpu, which has no number of replicas to share among workers; use strategy.name=mirrored
strategy.name=parameter_server & strategy.replicas=4 & cluster.workers=2 & cluster.ps=1 -> strategy.replicas=4 is not possible with parameter_server
strategy.name=mirrored & strategy.devices=2 & strategy.replicas=2 -> strategy.replicas=2 is not possible with strategy.devices='2', because both set the devices of a worker; leave one
strategy.name=mirrored & strategy.replicas=-1 -> strategy.replicas must be 0 (off) to 2560000. Received
strategy.name=mirrored & strategy.replicas=512 & global_batch_size=512 -> strategy.replicas=512 needs 512 virtual CPUs, more than 256; use 2, 4, 8, 16, 32, 64, 128 or 256 workers
strategy.name=multi_worker_mirrored & strategy.replicas=4 & cluster.workers=3 & global_batch_size=32 -> strategy.replicas=4 is not divisible by 3 workers; use 1, 2 or 4 workers, or a multiple of 3 replicas.
strategy.devices=GPU:0,GPU:1 -> one_device takes one device. Received: 'GPU:0,GPU:1'
cluster.workers=0 -> cluster.workers must be 1 to 10000, or MIN:MAX as 1:4. Received: 0.
cluster.workers=2 -> 'one_device' trains in one process, but cluster.workers is 2
cluster.ps=-1 -> cluster.ps must be 0 to 10000. Received: -1.
cluster.ps=1 -> 'one_device' has no parameter servers, but cluster.ps is 1
cluster.evaluator=2 -> cluster.evaluator must be 0 or 1. Received: 2.
cluster.warm=2 -> cluster.warm must be 0 or 1. Received: 2.
cluster.evaluator=1 & backup.save_freq=never -> cluster.evaluator is not possible with backup.save_freq=never, because it evaluates backups
cluster.evaluator=1 & task=synthetic -> task 'synthetic' has no method eval_data; add
strategy.name=parameter_server -> needs a parameter server: use --config.cluster.ps=1 or more
strategy.name=mirrored & strategy.placement=by_byte -> did you mean 'by_bytes'?
strategy.name=parameter_server & strategy.devices=2 & cluster.workers=2 & cluster.ps=1 -> strategy.devices='2' is not possible with parameter_server
strategy.name=parameter_server & jit_compile=True & cluster.workers=2 & cluster.ps=1 -> jit_compile is not possible
strategy.name=parameter_server & precision=mixed_float16 & cluster.workers=2 & cluster.ps=1 -> precision mixed_float16 is not possible with parameter_server
task=digts -> Unknown task 'digts'; did you mean 'digits'?
task=collections:Counter -> task 'collections:Counter' is not a tfdist.Task: it has no 'build_model'.
task=no_such_package:Task -> The module of task 'no_such_package:Task' cannot be found
task_options.filters=0 -> task_options.filters must be 1 to 100000. Received: 0.
task_options.dropout=1 -> task_options.dropout must be 0 or more and below 1. Received: 1.0.
task=synthetic & task_options.layers=-1 -> task_options.layers must be 0 to 1000000000.
global_batch_size=0 -> Exactly one of global_batch_size and per_replica_batch_size must be set
per_replica_batch_size=8 -> the other must be 0. Received: 32 and 8.
global_batch_size=-32 & per_replica_batch_size=32 -> global_batch_size must be 0 to 2147483647. Received: -32.
per_replica_batch_size=-1 -> per_replica_batch_size must be 0 to 2147483647. Received: -1.
precision=float16 -> unknown precision 'float16'; did you mean 'float32'?
epochs=0 -> epochs must be 1 to 2147483647. Received: 0.
steps_per_epoch=-1 -> steps_per_epoch must be 0 to 2147483647. Received: -1.
learning_rate=-0.1 -> learning_rate must be 0 to 1000000. Received: -0.1.
grace_seconds=-1.0 -> grace_seconds must be 0 to 1000000000. Received: -1.0.
seed=2147483648 -> seed must be 0 to 2147483647. Received: 2147483648.
learning_rate=1e30 -> learning_rate must be 0 to 1000000. Received: 1e+30.
steps_per_execution=1000000000000000000000000000000 -> steps_per_execution must be 1 to 2147483647
strategy.timeout_seconds=1e30 -> strategy.timeout_seconds must be 0 (off) to 1000000000
per_replica_batch_size=1000000000000000000000000000000 & global_batch_size=0 -> per_replica_batch_size must be 0 to
strategy.devices=/job:worker/device:CPU:0 -> strategy.devices must be names such as GPU:0
task_options.filters=1000000000000000000000000000000 -> task_options.filters must be 1 to 100000
compression.name=int8 & compression.block=1152921504606846976 -> compression.block must be a power of two, 4 to
task=synthetic & task_options.width=1000000000000000000000000000000 -> task_options.width must be 1 to 1000000000
strategy.devices=, -> strategy.devices names no device; leave it empty
backup.dir=/dev/null/x -> backup.dir must be a folder, and a parent folder of it is a file
backup.save_freq=00 -> backup.save_freq must be 'epoch', 'never' or a number of steps
backup.save_freq=-1 -> backup.save_freq must be 'epoch', 'never' or a number of steps
backup.save_freq=٣ -> backup.save_freq must be 'epoch', 'never' or a number of steps
backup.save_freq=1.5 -> backup.save_freq must be 'epoch', 'never' or a number of steps
backup.save_freq= -> backup.save_freq must be 'epoch', 'never' or a number of steps
strategy.name=mirrored & strategy.devices=nonsense -> must be names such as GPU:0
strategy.name=mirrored & strategy.devices=GPU:x -> such as GPU:0
compression.name=powersdg -> Unknown compression 'powersdg'; did you mean 'powersgd'?

# Optimizers
optimizer.name=adadelta & optimizer.rhos=0.9 -> optimizer 'adadelta' takes no 'rhos'; did you mean 'rho'? It takes: rho, epsilon, weight_decay,
optimizer.name=adadelta & optimizer.rho=2.0 -> optimizer.rho must be 0 to 0.9999999. Received: 2.0.
optimizer.name=adadelta & optimizer.gradient_accumulation_steps=1 -> must be 0 (off) or 2 to 2147483647. Received: 1.
optimizer.name=adam & optimizer.clipnorm=-1.0 -> optimizer.clipnorm must be
optimizer.name=adam & optimizer.global_clipnorm=inf -> optimizer.global_clipnorm must be
optimizer.name=adam & optimizer.clipvalue=nan -> optimizer.clipvalue must be
optimizer.name=adam & optimizer.epsilon=0 -> optimizer.epsilon must be 1e-30 to 1000.
optimizer.name=adam & optimizer.epsilon=nan -> optimizer.epsilon must be 1e-30 to 1000.
optimizer.name=adam & optimizer.epsilon=1e30 -> optimizer.epsilon must be 1e-30 to 1000.
optimizer.name=adam & optimizer.beta_2=1 -> optimizer.beta_2 must be 0 to 0.9999999.
optimizer.name=adam & optimizer.beta_2=inf -> optimizer.beta_2 must be 0 to 0.9999999.
optimizer.name=rmsprop & optimizer.rho=1.5 -> optimizer.rho must be 0 to 0.9999999.
optimizer.name=sgd & optimizer.momentum=1 -> optimizer.momentum must be 0 to 0.9999999.
optimizer.name=lion & optimizer.beta_1=0 -> optimizer.beta_1 must be 1e-07 to 0.9999999.
optimizer.name=adam & optimizer.ema_momentum=1 -> optimizer.ema_momentum must be 0 to 0.9999999.
optimizer.name=adamw & optimizer.weight_decay=1e30 -> optimizer.weight_decay must be 0 to 1000000.
optimizer.name=adam & optimizer.clipnorm=1e31 -> optimizer.clipnorm must be 0 (off) to 1e+30.
optimizer.name=muon & optimizer.ns_steps=0 -> optimizer.ns_steps must be 1 to 1000.
optimizer.name=muon & optimizer.muon_a=nan -> optimizer.muon_a must be -10 to 10.
optimizer.name=adafactor & optimizer.clip_threshold=-1 -> optimizer.clip_threshold must be 1e-06 to 1e+30.
optimizer.name=adafactor & optimizer.beta_2_decay=0.5 -> optimizer.beta_2_decay must be -10 to 0.
optimizer.name=ftrl & optimizer.learning_rate_power=5 -> optimizer.learning_rate_power must be -10 to 0.
optimizer.name=adagrad & optimizer.initial_accumulator_value=-1 -> optimizer.initial_accumulator_value must be 0 to 1000000.
optimizer.name=adam & optimizer.ema_overwrite_frequency=-3 -> optimizer.ema_overwrite_frequency must be 0 (off) to 2147483647.
optimizer.name=adam & optimizer.loss_scale_factor=inf -> optimizer.loss_scale_factor must be 1e-06 to 1e+15.
optimizer.name=: -> optimizer must be your own as 'package.module:Name'. Received: ':'
optimizer.name=nope_nope:x -> optimizer 'nope_nope:x' cannot be found
optimizer.rhoo=0.9 & optimizer.name=adadelta -> --config.optimizer.rhoo: optimizer 'adadelta' takes no 'rhoo'; did you mean 'rho'?
optimizer.beta_1=x -> --config.optimizer.beta_1: expected a number. Received: 'x'.
optimizer.name=adm -> Unknown optimizer 'adm'; did you mean 'adam'?
optimizer.momentum=0.9 -> optimizer 'adam' takes no 'momentum', which is an option of muon, rmsprop, sgd. It takes: beta_1
optimizer.name=sgd & optimizer.beta_1=0.8 -> schedulefreeadamw. It takes: momentum, nesterov, weight_decay,
optimizer.clipnorm=1 & optimizer.clipvalue=1 -> may be set. Received: clipnorm, clipvalue.
optimizer.gradient_accumulation_steps=8 & steps_per_epoch=2 & epochs=2 -> gradient_accumulation_steps is 8, but the run has 4 steps, so that no weight would be updated
strategy.name=parameter_server & optimizer.gradient_accumulation_steps=2 & cluster.workers=2 & cluster.ps=1 -> optimizer.gradient_accumulation_steps is not possible with parameter_server

# Schedules
schedule.name=cosin -> unknown schedule.name 'cosin'; did you mean 'cosine'?
schedule.name=step -> schedule 'step' needs schedule.boundaries, such as 3000,6000 updates or 0.5,0.75 of the run.
schedule.warmup_steps=-1 -> schedule.warmup_steps must be 0 (off) to 2147483647. Received: -1.
schedule.warmup_epochs=nan -> schedule.warmup_epochs must be 0 (off) to 2147483647. Received: nan.
schedule.warmup_steps=1 & schedule.warmup_epochs=1.0 -> Only one of schedule.warmup_steps and schedule.warmup_epochs may be
schedule.name=cosine & schedule.end=2.0 -> schedule.end must be 0 to 1, a share of learning_rate. Received: 2.0.
schedule.name=polynomial & schedule.power=0.0 -> schedule.power must be 0.001 to 1000. Received: 0.0.
schedule.end=0.5 -> schedule 'constant' takes no 'end'. It takes: warmup_steps, warmup_epochs.
schedule.name=step & schedule.boundaries=4 & schedule.decay_steps=3 -> schedule 'step' takes no 'decay_steps'. It takes:
schedule.name=step & schedule.boundaries=x -> schedule.boundaries must be numbers, comma separated. Received: 'x'.
schedule.name=step & schedule.boundaries=nan -> schedule.boundaries must be
schedule.name=step & schedule.boundaries=6,3 -> schedule.boundaries must be numbers above 0 that rise, either all
schedule.name=step & schedule.boundaries=0.5,3 -> schedule.boundaries must be numbers above 0 that rise, either all
schedule.name=step & schedule.boundaries=1.5 -> schedule.boundaries must be whole numbers, or shares below 1.
schedule.name=step & schedule.boundaries=3,6 & schedule.factor=1,2,3 -> or one for each of schedule.boundaries (2). Received
schedule.name=step & schedule.boundaries=3 & schedule.factor=-1 -> schedule.factor must be one number of 0 to 1000, or one
learning_rate_scaling=liner -> unknown learning_rate_scaling 'liner'; did you mean 'linear'?
learning_rate_scaling=linear & strategy.name=parameter_server & cluster.workers=2 & cluster.ps=1 -> learning_rate_scaling 'linear' is not possible with parameter_server, where each step runs on one worker; use learning_rate_scaling=none.
schedule.name=step & schedule.boundaries=1e300 -> schedule.boundaries must be at most 2147483647
schedule.warmup_steps=1000000000000000000000000000000 -> schedule.warmup_steps must be 0 (off) to 2147483647
schedule.warmup_epochs=1e300 -> schedule.warmup_epochs must be 0 (off) to 2147483647
schedule.name=polynomial & schedule.power=1e30 -> schedule.power must be 0.001 to 1000
schedule.name=step & schedule.boundaries=, -> needs schedule.boundaries, such as 3000,6000

# Callbacks
callbacks=EarlyStoping() -> unknown callback 'EarlyStoping'; did you mean 'EarlyStopping'?
callbacks=EarlyStopping(patiance=3) -> unknown argument of callback EarlyStopping 'patiance'; did you mean 'patience'?
callbacks=EarlyStopping(3) -> callbacks must be such as 'EarlyStopping(monitor=val_loss, patience=3);
callbacks=EarlyStopping(patience=__import__('os')) -> callbacks must be such as
callbacks=EarlyStopping(**{}) -> callbacks must be such as
callbacks=EarlyStopping(patience=3 -> callbacks must be such as
callbacks=EarlyStopping()() -> callbacks must be such as
callbacks=a.b:C(x=1) + 1 -> callbacks must be such as
callbacks=EarlyStopping(patience=abc) -> patience of EarlyStopping must be a whole number, 0 to
callbacks=EarlyStopping(mode=up) -> mode of EarlyStopping must be one of: auto, min, max. Received: 'up'.
callbacks=EarlyStopping(min_delta=1e999) -> min_delta of EarlyStopping must be a finite number. Received: inf.
callbacks=EarlyStopping(restore_best_weights=true) -> must be True or False. Received: 'true'.
callbacks=ReduceLROnPlateau(factor=1) -> factor of ReduceLROnPlateau must be a number, 1e-30 to 0.9999999.
callbacks=CSVLogger() -> CSVLogger needs filename, such as CSVLogger(filename='log.csv').
callbacks=CSVLogger(filename='/proc') -> must be a file that can be written. Received: '/proc' (it is a folder).
callbacks=CSVLogger(filename=x, separator=', ') -> separator of CSVLogger must be one character.
callbacks=ModelCheckpoint(filepath='x.pt') -> filepath of ModelCheckpoint must end in .keras or .h5. Received: 'x.pt'
callbacks=ModelCheckpoint(filepath='{epoch.keras') -> or a metric such as {val_loss:.2f} are filled in. Received
callbacks=ModelCheckpoint(filepath='{epoch:zz}.keras') -> or a metric such as {val_loss:.2f} are filled in. Rec
callbacks=ModelCheckpoint(filepath='{batch}.keras') -> has {batch}, which is not known after an epoch; see save_fre
callbacks=ModelCheckpoint(filepath='x.keras', save_freq=0) -> must be 'epoch' or a number of steps, 1 or more. Rec
callbacks=SwapEMAWeights() -> SwapEMAWeights needs optimizer.use_ema, but it is False
callbacks=SwapEMAWeights() & optimizer.use_ema=True & strategy.name=mirrored & strategy.shard_optimizer=True -> SwapEMAWeights is not possible with strategy.shard_optimizer
task=synthetic & callbacks=EarlyStopping() -> 'val_loss', but task 'synthetic' has no method eval_
validation_freq=3 & callbacks=EarlyStopping() -> 'val_loss', but no epoch is validated: validation
callbacks=EarlyStopping(patience=3, patience=4) -> and each argument once. Received: 'EarlyStopping(patience=3, pa
callbacks=ModelCheckpoint(filepath='{epoch:300}.keras') -> a file's name has at most 255 bytes
callbacks=ModelCheckpoint(filepath='\ud800.keras') -> a path has no lone surrogates
callbacks=nope_nope:x -> callback 'nope_nope:x' cannot be found: No module named 'nope_nope'
callbacks=os: -> callback must be your own as 'package.module:Name'. Received: 'os:'
"""


@pytest.fixture(scope="module")
def config_flag(tmp_path_factory):
    file = tmp_path_factory.mktemp("sentences") / "run.py"
    file.write_text("import tfdist\ndef get_config():\n    return tfdist.TrainConfig(global_batch_size=32)\n")
    return f"--config={file}"


@pytest.mark.parametrize("row", [line for line in SENTENCES.splitlines() if " -> " in line])
def test_a_fault_is_one_sentence(row, config_flag):
    fields, _, sentence = row.partition(" -> ")
    arguments = [each if each.startswith("-") else f"--config.{each}" for each in fields.split(" & ")]
    with pytest.raises(ConfigError) as raised:
        flags.parse(["train", config_flag, *arguments], "")
    (fault,) = raised.value.faults
    assert sentence in fault
    assert fault.isprintable() and len(fault) < 1000


@pytest.mark.parametrize("kind", [ConfigError, ClusterError, DataError, BackupError])
def test_the_text_of_an_error_controls_no_terminal(kind):
    assert str(kind("said \x1b[31mred\r\n")).isprintable()


@pytest.mark.parametrize("kind", [ConfigError, ClusterError, DataError, BackupError])
def test_an_error_of_a_layer_is_its_own_sentence(kind):
    import keras

    class Refusing(keras.layers.Layer):
        def call(self, x, training=None):
            raise kind("x must be y. Received: 'z'.")

    for x in (keras.Input((2,)), keras.ops.ones((1, 2))):
        with pytest.raises(kind) as raised:
            Refusing()(x)
        assert str(raised.value) == "x must be y. Received: 'z'."
    if kind is ConfigError:
        faults = ("x must be y.", "Give z.")
        text = "Exception encountered when calling A.call().\n\n\x1b[1m{}\x1b[0m\n\nArguments received by A.call():"
        assert ConfigError(text.format("\n".join(faults))).faults == faults
