"""The loops of `fit`, `evaluate`, `predict` and `trainer.step`: Keras' loops, in Keras' order, on the steps of an engine."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import keras

from tfdist.aliases import Callbacks, Data, Function, Logs, Structure
from tfdist.backup.data_position import TrainingPasses
from tfdist.backup.session import BackupSession
from tfdist.compat import call_stack, keras_loops, tf_internals
from tfdist.data import row_source
from tfdist.data.source import DataSource, Passes
from tfdist.engine import Engine
from tfdist.errors import ConfigError, stop_iteration_error
from tfdist.runtime.report import progress
from tfdist.runtime.report.phase import phase
from tfdist.step import model_building
from tfdist.training import input_data, recording


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The engine, the backups and the reports of a training, beside the arguments of Keras' `fit`.

    Attributes:
        engine: The engine, which has attached the model.
        session: Backs up and resumes the training, if any.
        reports: Whether to report the progress to the supervisor.
    """

    engine: Engine
    session: BackupSession | None = None
    reports: bool = False


class Hooks(keras.callbacks.CallbackList):
    """The callbacks of a loop. In `fit`, `session` writes backups, and `reports` tells whether to report to the supervisor.

    Attributes:
        validation: The passes over the validation data of `fit`, once a validation has begun.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        session: BackupSession | None = None,
        reports: bool = False,
        **options: Any,
    ):
        self.session = session
        self.reports = reports
        self.validation: Passes | None = None
        super().__init__(callbacks, **options)


def fit(
    surroundings: Surroundings,
    model: keras.Model,
    x: Data = None,
    y: Data = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Callbacks = None,
    validation_split: float = 0.0,
    validation_data: Data = None,
    shuffle: bool | str = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Data = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
) -> keras.callbacks.History:
    """Trains a model, as Keras' `fit`. In all loops, `x` may also be a function `(tf.distribute.InputContext) -> tf.data.Dataset`."""
    engine = surroundings.engine
    keras_loops.check_compiled(model)
    recording.prepare(model)
    most = keras.config.max_epochs()
    if most and most < epochs:
        warnings.warn(f"Limiting epochs to {most}", stacklevel=2)
        epochs = most
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = keras_loops.train_validation_split(
            (x, y, sample_weight), validation_split=validation_split
        )
    data = x, y, sample_weight
    size = int(model.steps_per_execution)
    source = input_data.open_source(
        engine, data, batch_size, steps_per_epoch, shuffle, class_weight, size, initial_epoch
    )
    passes = _training_passes(model, source, steps_per_epoch, surroundings.session)
    passes.validation_generator = input_data.generator_batches(validation_data)
    hooks = _training_hooks(model, callbacks, surroundings, epochs=epochs, verbose=verbose, steps=passes.steps)

    def validate(epoch: int) -> dict[str, Any]:
        if validation_data is None or not _is_due(epoch, validation_freq):
            return {}
        x, y, sample_weight = data = keras.utils.unpack_x_y_sample_weight(validation_data)
        size = validation_batch_size or batch_size
        # Opened once for all validations, as by Keras.
        if hooks.validation is None:
            hooks.validation = _passes(engine, model, data, size, validation_steps)
        # Not `evaluate` of this module: the model's class may override the method.
        logs = model.evaluate(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=size,
            steps=validation_steps,
            callbacks=hooks,
            return_dict=True,
        )
        return {f"val_{name}": value for name, value in logs.items()}

    def epoch_logs(logs: Logs) -> dict[str, Any]:
        return dict(engine.epoch_logs(model, model.train_function, logs))

    # `train` does all but the steps, which the user's loop runs in place of this one under `trainer.step`.
    training = train(hooks, passes, initial_epoch, epochs, epoch_logs, validate)
    with _closing(training, passes):
        logs = None
        try:
            while True:
                remaining_steps = training.send(logs)
                logs = engine.run(model.train_function, passes.iterator, remaining_steps)
        except StopIteration:
            pass
    if hooks.validation:
        hooks.validation.close()
    return model.history


def train(
    hooks: Hooks,
    passes: TrainingPasses,
    initial_epoch: int,
    epochs: int,
    epoch_logs: Callable[[Logs], dict[str, Any]],
    validate: Callable[[int], dict[str, Any]] = lambda epoch: {},
) -> Generator[int | None, Any, None]:
    """Runs the hooks, validations and backups of a training; the caller runs the steps. Epochs count from 0.

    `epoch_logs` computes an epoch's logs from the logs of its last step; `validate` returns the logs of the validation after an epoch.

    Yields:
        For each execution the number of remaining steps of the epoch, None if unknown. Send the logs of the execution's last step; None ends the pass.
    """
    model = hooks.model
    session = hooks.session
    logs = None
    training_logs = None
    report: Callable[..., None] = progress.write if hooks.reports else lambda **_: None
    model.stop_training = False
    model.make_train_function()
    _call(hooks.on_train_begin)
    planned = range(initial_epoch, epochs)
    passes.position.epoch = initial_epoch
    # After the callbacks' own `on_train_begin`, which would overwrite the state that the session restores.
    if session:
        planned = session.on_train_begin(planned)
        logs = session.resumed_logs
    recorder = recording.recorder(model, passes.position.step)
    report(saved=passes.position.step, **passes.progress(epochs))
    for epoch in planned:
        report(**passes.progress(epochs))
        model.reset_metrics()
        with phase("training"):
            _call(hooks.on_epoch_begin, epoch)
            executions = passes.epoch()
            if session:
                executions = session.resumed(executions)
            for begin, end, remaining_steps in executions:
                _call(hooks.on_train_batch_begin, begin)
                step_logs = yield remaining_steps
                if step_logs is None:  # the data have ended before the step
                    passes.end_early()
                    break
                logs = step_logs
                if recorder:
                    # The logs of a step are a mean over replicas, which may have unequal parts of the last batch.
                    recorder.add(epoch_logs(logs))
                _call(hooks.on_train_batch_end, end, logs)
                done = passes.on_steps_done(end)
                report(done=passes.position.step, metrics=logs)
                # After the callbacks, whose state the backup holds. It may end the process.
                if session:
                    _call(session.on_execution_end, logs, done)
                if recorder and recorder.ends():
                    model.stop_training = True
                if model.stop_training:
                    break
            tf_internals.wait_for_asynchronous_steps()
        if logs is None:
            raise ConfigError("The training data hold no batch.")
        training_logs = epoch_logs(logs)
        training_logs.update(validate(epoch))
        _call(hooks.on_epoch_end, epoch, training_logs)
        report(metrics=training_logs)
        passes.next_epoch(epoch)
        if session:
            _call(session.on_epoch_end, epoch + 1 == epochs)
        if model.stop_training:
            break
    # Replaces the weights by their moving averages, if the optimizer keeps some (`use_ema`).
    if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
        model.optimizer.finalize_variable_values(model.trainable_weights)
    _call(hooks.on_train_end, training_logs)
    if session:
        session.on_train_end()


def evaluate(
    engine: Engine,
    model: keras.Model,
    x: Data = None,
    y: Data = None,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    sample_weight: Data = None,
    steps: int | None = None,
    callbacks: Callbacks = None,
    return_dict: bool = False,
) -> Logs:
    """Evaluates a model that the engine has attached, as Keras' `evaluate`."""
    keras_loops.check_compiled(model)
    opened: list[Passes] = []
    session = None
    if isinstance(callbacks, Hooks) and callbacks.validation:
        passes = callbacks.validation  # `fit` closes them
        session = callbacks.session
    else:
        passes = _passes(engine, model, (x, y, sample_weight), batch_size, steps)
        opened.append(passes)
    model_building.build(model, "test_step", passes.source.form, passes.source.parts)
    passes.reset()
    hooks = _hooks(model, callbacks, passes, verbose)
    model.make_test_function()
    model.stop_evaluating = False
    _call(hooks.on_test_begin)
    # A preemption during the validation saves the state before it.
    if session:
        session.on_validation_begin()
    logs: Logs = None
    model.reset_metrics()
    with _closing(*opened), phase("validation"):
        for begin, end, remaining_steps in passes.epoch():
            _call(hooks.on_test_batch_begin, begin)
            step_logs = engine.run(model.test_function, passes.iterator, remaining_steps)
            if step_logs is None:
                passes.end_early()
                break
            logs = step_logs
            _call(hooks.on_test_batch_end, end, logs)
            if session:
                session.on_validation_batch_end()
            if model.stop_evaluating:
                break
        tf_internals.wait_for_asynchronous_steps()
    if logs is None:
        raise ConfigError("The data for evaluation or validation hold no batch.")
    logs = keras_loops.pythonify_logs(engine.epoch_logs(model, model.test_function, logs))
    _call(hooks.on_test_end, logs)
    if session:
        session.on_validation_end()
    if return_dict:
        return logs
    return keras_loops.flat_logs(model, logs)


def predict(
    engine: Engine,
    model: keras.Model,
    x: Data,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    steps: int | None = None,
    callbacks: Callbacks = None,
) -> Structure:
    """Returns the outputs of a model that the engine has attached, as Keras' `predict`."""
    passes = _passes(engine, model, (x, None, None), batch_size, steps)
    size = int(model.steps_per_execution)
    hooks = _hooks(model, callbacks, passes, verbose)
    model.make_predict_function()
    model.stop_predicting = False
    run = engine.predictor(model, passes, passes.steps_per_epoch)
    parts: list[Structure] = []
    _call(hooks.on_predict_begin)
    with _closing(passes), phase("prediction"):
        for begin, end, remaining_steps in passes.epoch():
            _call(hooks.on_predict_batch_begin, begin)
            if remaining_steps is None:
                remaining_steps = size
            outputs = run(min(size, remaining_steps))
            if outputs is None:
                passes.end_early()
                break
            parts.append(outputs)
            _call(hooks.on_predict_batch_end, end, {"outputs": outputs})
            if model.stop_predicting:
                break
        tf_internals.wait_for_asynchronous_steps()
    if not parts:
        raise ConfigError("The data to predict hold no batch.")
    _call(hooks.on_predict_end)
    return keras_loops.joined_outputs(parts)


def steps(
    surroundings: Surroundings,
    model: keras.Model,
    x: Data,
    y: Data = None,
    sample_weight: Data = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = 0,
    callbacks: Callbacks = (),
    shuffle: bool | str = True,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
) -> Iterator[Structure]:
    """Yields each batch of the training of a `StepModel`; the caller runs the steps."""
    recording.prepare(model)
    data = x, y, sample_weight
    source = input_data.open_source(
        surroundings.engine, data, batch_size, steps_per_epoch, shuffle, initial_epoch=initial_epoch
    )
    passes = _training_passes(model, source, steps_per_epoch, surroundings.session)
    hooks = _training_hooks(model, callbacks, surroundings, epochs=epochs, verbose=verbose, steps=passes.steps)
    training = train(hooks, passes, initial_epoch, epochs, lambda logs: dict(model.logs))
    with _closing(training, passes):
        logs = None
        while True:
            try:
                training.send(logs)
            except StopIteration:
                return
            batch = input_data.next_batch(passes.iterator, model.distribute_strategy)
            logs = None
            if batch is not None:
                yield batch
                logs = model.logs


def _passes(
    engine: Engine, model: keras.Model, data: tuple[Any, Any, Any], batch_size: int | None, steps: int | None
) -> Passes:
    """Returns the passes of an evaluation or a prediction over `(x, y, sample_weight)`."""
    source = input_data.open_source(engine, data, batch_size, steps, per_execution=int(model.steps_per_execution))
    return Passes(source, steps, int(model.steps_per_execution), model.distribute_strategy.begin_pass)


def _training_passes(
    model: keras.Model, source: DataSource, steps_per_epoch: int | None, session: BackupSession | None
) -> TrainingPasses:
    """Builds the model and returns the passes of a training."""
    size = int(model.steps_per_execution)
    passes = TrainingPasses(source, steps_per_epoch, size, model.distribute_strategy.begin_pass, session is not None)
    if session:
        session.passes = passes
    with passes.state.preserve_seed_generators():
        model_building.build(model, "train_step", source.form, source.parts)
    passes.reset()
    return passes


def _training_hooks(
    model: keras.Model,
    callbacks: Callbacks,
    surroundings: Surroundings,
    **shown: Any,
) -> Hooks:
    """Returns the hooks of a training; the session backs up the callbacks' state, except the progress bar's."""
    listed = input_data.as_list(callbacks)
    if not any(isinstance(callback, keras.callbacks.History) for callback in listed):
        listed.append(keras.callbacks.History())
    session = surroundings.session
    if session:
        session.watch(listed)
    shows = shown["verbose"] != 0
    return Hooks(listed, session, surroundings.reports, add_history=True, add_progbar=shows, model=model, **shown)


def _hooks(model: keras.Model, callbacks: Callbacks, passes: Passes, verbose: str | int) -> Hooks:
    if isinstance(callbacks, Hooks):
        return callbacks
    shown: dict[str, Any] = {"verbose": verbose, "epochs": 1, "steps": passes.steps}
    return Hooks(input_data.as_list(callbacks), add_progbar=verbose != 0, model=model, **shown)


def _call(function: Function, *args: Any) -> Any:
    """Calls a hook. If the hook raises StopIteration, from `next()` without a default, raises an error that names the callback and its method."""
    try:
        return function(*args)
    except StopIteration as e:
        where = f"A callback's {function.__name__}"
        raising = call_stack.raising_callback(e)
        if raising:
            where = f"{type(raising[0]).__name__}.{raising[1]}"
        raise stop_iteration_error(where, e) from e


@contextlib.contextmanager
def _closing(*parts: Any) -> Iterator[None]:
    """Closes generators and passes, also after an error: its traceback would keep them open."""
    try:
        with row_source.explaining_reads():
            yield
    finally:
        for part in parts:
            part.close()


def _is_due(epoch: int, frequency: int | Sequence[int]) -> bool:
    """Returns whether a validation follows `epoch`, which counts from 0."""
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    if isinstance(frequency, list):
        return epoch + 1 in frequency
    raise ValueError(
        f"Expected `validation_freq` to be a list or int. Received: validation_freq={frequency} of the type {type(frequency)}."
    )
