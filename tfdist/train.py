"""Trains what a config file says: `python -m tfdist.train --config=configs/digits.py --workdir=DIR`.

With a cluster in the environment (TF_CONFIG) this process is one task of it. Without one, and with
`--config.cluster.workers=2`, it starts that many tasks on this machine and watches them. Fields of the configuration
are set as `--config.optimizer.momentum=0.9`. Exit code 0 means that the training has finished; 2, that the
configuration is faulty; 75, that it was told to end (SIGTERM), has saved, and the same command goes on from there.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from tfdist.cluster import ClusterSpec, TaskSpec, task_versions
from tfdist.cluster.resolvers import discovery, environment
from tfdist.compat import keras_backend
from tfdist.config import TrainConfig, registry
from tfdist.config import batch_size as batch_size_lib
from tfdist.config import flags as flags_lib
from tfdist.config import train as config_lib
from tfdist.config.workdir import make_workdir
from tfdist.errors import BackupError, ClusterError, ConfigError, collect_errors
from tfdist.launch import network_namespaces
from tfdist.launch.launcher import Launcher
from tfdist.runtime import exit_status, preemption

_SOURCE = "TFDIST_SOURCE"  # who is asked for the cluster by the tasks that this command starts

if TYPE_CHECKING:
    from tfdist.training.trainer import Trainer


def train(
    config: TrainConfig,
    workdir: str | os.PathLike[str],
    trainer: Trainer | None = None,
    cluster: tuple[ClusterSpec, TaskSpec] | Literal[False] | None = None,
) -> dict[str, Any]:
    """Runs one task of a training and, on the chief, writes the run's files.

    Args:
        config: What to train, checked by `validation.check`.
        workdir: Where `summary.json`, `config.json`, `model.keras` and `tensorboard/<task>/` go.
        trainer: An existing trainer to use, with a strategy of its own. None means one made from `config`.
        cluster: As for the `Trainer`.

    Returns:
        The summary, as in `summary.json`.

    Raises:
        ConfigError: The configuration does not fit the devices found.
    """
    started = time.perf_counter()
    _import_frameworks()
    import keras
    import tensorflow as tf

    from tfdist.backup.callback import BackupAndRestore
    from tfdist.gradients.configured_optimizer import build_optimizer
    from tfdist.monitoring import network, summary_table, tensorboard
    from tfdist.monitoring import summary as summary_lib
    from tfdist.monitoring import throughput as throughput_lib
    from tfdist.training.trainer import Trainer

    workdir = pathlib.Path(workdir)
    backup = None
    if config.backup.save_freq != "never":
        backup = BackupAndRestore(**config_lib.backup_arguments(config, workdir))
    trainer = trainer or Trainer(
        config.strategy,
        cluster,
        backup=backup,
        compression=config.compression,
        start_timeout=config.start_timeout,
        check_weights=config.check_weights,
    )
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.mixed_precision.set_dtype_policy(config.precision)

    replicas = trainer.num_replicas
    asynchronous = config.strategy.name == "parameter_server"  # a step is one worker's
    in_sync = 1 if asynchronous else replicas
    batch_size = config.global_batch_size or config.per_replica_batch_size * in_sync
    batch_size_lib.per_replica_batch_size(batch_size, in_sync)
    task = registry.resolve("task", config.task, registry.TASKS)(config.task_options)
    steps = config.steps_per_epoch or task.steps_per_epoch(batch_size)
    if steps == 0:
        raise ConfigError(f"global_batch_size {batch_size} is larger than the training data of task {config.task!r}.")
    trainer.say_replicas(batch_size)
    if trainer.is_chief:
        summary_lib.write_json(workdir / "config.json", config_lib.to_dict(config))

    with trainer.scope():
        model = task.build_model()
        arguments = {"jit_compile": config.jit_compile, "steps_per_execution": config.steps_per_execution}
        model.compile(optimizer=build_optimizer(config), **{**arguments, **task.compile_arguments()})
    throughput = throughput_lib.Throughput(batch_size)
    callbacks: list[keras.callbacks.Callback] = [throughput]
    in_step = trainer.cluster if not asynchronous else None
    begins = trainer.compression.start_step if trainer.compression else 0
    sent = network.WireBytes(in_step, trainer.task, begins=begins) if in_step else None
    if sent:
        callbacks.append(sent)
    if trainer.is_chief:
        callbacks.append(tensorboard.Scalars(workdir / "tensorboard" / trainer.task.name, throughput))
    history = trainer.fit(
        model,
        lambda context: task.train_data(context, batch_size, config.seed),
        validation_data=task.eval_data(batch_size),
        epochs=config.epochs,
        steps_per_epoch=steps,
        callbacks=callbacks,
    )
    trainer.save(model, workdir / "model.keras", delete_backup=False)

    wire_bytes = summary_lib.wire_bytes_per_step(model, trainer.compression, replicas, sent)
    summary = summary_lib.summarize(
        config,
        trainer.cluster,
        replicas,
        history,
        throughput,
        wire_bytes,
        trainer.server_report(model),
        started,
    )
    if trainer.is_chief:
        summary_lib.write_json(workdir / "summary.json", summary)
        summary_table.print_summary(summary, workdir)
    trainer.delete_backup()  # with everything written
    return summary


def _import_frameworks() -> None:
    """Imports TensorFlow and Keras with the garbage collector at rest: it finds nothing there, and takes a second to look."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("tfdist.training.trainer")
    finally:
        if enabled:
            gc.enable()
    gc.freeze()  # nor need it look there later on


def launch(config: TrainConfig, argv: Sequence[str], workdir: pathlib.Path) -> int:
    """Runs this same command as every task of a cluster on this machine; returns the exit code."""
    # The tasks are told of their cluster in TF_CONFIG, whoever was to be asked here.
    command = [sys.executable, "-m", "tfdist.train", *argv[1:]]
    netns = os.environ.get(network_namespaces.VARIABLE, "")
    cluster, prefixes = network_namespaces.assign_namespaces(config.cluster.workers, config.cluster.ps, netns)
    launcher = Launcher(
        command,
        cluster,
        workdir / "logs",
        {**os.environ, _SOURCE: "tf_config"},
        prefixes=prefixes,
        grace_seconds=config.grace_seconds,
        max_restarts=config.max_restarts,
    )
    return launcher.run()


def main(argv: Sequence[str]) -> int:
    """Runs `python -m tfdist.train`; returns the exit code."""
    try:
        exit_status.exit_code = _main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_status.exit_code = 128 + signal.SIGPIPE
    return exit_status.exit_code


def _main(argv: Sequence[str]) -> int:
    # TensorFlow's C++ log: errors only. Read when TensorFlow is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    faults: list[str] = []
    found: environment.ResolvedCluster | None = None

    def workers(config: TrainConfig) -> int | None:
        nonlocal found
        with collect_errors(faults):
            asked = {
                **config.cluster.resolver_arguments(),
                **({"source": os.environ[_SOURCE]} if _SOURCE in os.environ else {}),
            }
            found = discovery.resolve(timeout=config.start_timeout, **asked)
            return len(found.cluster.training_tasks()) if found else None
        return 0

    try:
        with collect_errors(faults):
            keras_backend.check()
        with collect_errors(faults):
            parsed = flags_lib.parse(argv, __doc__, workers)
            if parsed is None:
                return 0
            if not faults:
                config, workdir = parsed
                if found is None and (hint := discovery.misconfiguration_hint()):
                    print(f"tfdist: training on this host alone, though {hint}.", flush=True)
                starts = found is None and (config.cluster.workers > 1 or config.cluster.ps > 0)
                if starts or found is None or found.task == found.cluster.chief:
                    make_workdir(workdir)
                if starts:
                    return launch(config, argv, workdir)
                text = json.dumps({**config_lib.fixed(config), "epochs": config.epochs}, default=str)
                task_versions.configuration = task_versions.checksum(text.encode())
                if config.backup.save_freq != "never" and threading.current_thread() is threading.main_thread():
                    # From here on, as the Trainer, which comes with TensorFlow, some seconds later.
                    signal.signal(signal.SIGTERM, preemption.end_at_once)
                train(config, workdir, cluster=found.apply() if found else False)
    except (ClusterError, BackupError) as e:
        print(f"tfdist: {e}", file=sys.stderr)
        return 1
    for fault in faults:
        print(f"tfdist: {fault}", file=sys.stderr)
    return 2 if faults else 0


def leave(code: int) -> NoReturn:
    """Ends this process, once what is registered for its end has run; for `python -m tfdist.train` alone.

    To take TensorFlow down as well would need a second, on a busy machine many, in which tasks that are done with it first are
    missed by the others ("stopped sending heartbeats").
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_code = main(sys.argv)
    if "tensorflow" in sys.modules:
        leave(exit_code)
    sys.exit(exit_code)
