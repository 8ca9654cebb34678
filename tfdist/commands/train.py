"""Trains the model of a preset or a config file: `tfdist train --config=digits --workdir=DIR`.

`python -m tfdist.train` is the same command.
With a cluster in the environment (TF_CONFIG) this process is one task of the cluster. Without a cluster,
`--config.cluster.workers=2` starts two tasks on this machine and watches them. Set fields of the configuration
as `--config.optimizer.momentum=0.9`. Exit code 0 means that the training has finished; 2, that the
configuration is invalid; 75, that the training has saved after SIGTERM: the same command resumes it.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.cluster import local_cluster, task_versions
from tfdist.commands import summary_table
from tfdist.compat import keras_backend
from tfdist.config import flags as flags_lib
from tfdist.config.cluster import worker_range
from tfdist.errors import BackupError, ClusterError, ConfigError, DataError, collect_errors, format_value
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options
from tfdist.launch.sizes import Sizes
from tfdist.launch.start import Host
from tfdist.ray.connection import ray_host
from tfdist.runtime import tensorflow_log
from tfdist.runtime.end import process_end
from tfdist.runtime.files import WriteError
from tfdist.runtime.log import logger, print_always
from tfdist.runtime.report import progress
from tfdist.training.finished_run import SOURCE
from tfdist.training.prepared_run import PreparedRun


def main(argv: Sequence[str]) -> int:
    """Runs `tfdist train`; returns the exit code."""
    print_always()
    task_versions.script = __file__  # equal for `tfdist train` and `python -m tfdist.train`
    return process_end.run_command(_main, argv)


def _main(argv: Sequence[str]) -> int:
    tensorflow_log.set_level()
    faults: list[str] = []
    try:
        with collect_errors(faults):
            keras_backend.check()
        with collect_errors(faults):
            command = flags_lib.read(argv, __doc__)
            if command is None:  # --help
                return 0
            prepared = PreparedRun(command.config, command.workdir, command.overwrite, command.faults)
            if not faults:
                with prepared.claim():
                    return launch(prepared, argv) if prepared.starts_tasks else train(prepared)
    except (ClusterError, BackupError, DataError, WriteError, FloatingPointError) as e:
        logger.error(e)
        return 1
    for fault in faults:
        logger.error(fault)
    return process_end.FAULTY_CONFIG


def train(prepared: PreparedRun) -> int:
    """Trains as one task of a run, or evaluates as its evaluator; the chief prints the results. Returns the exit code."""
    process_end.limit_interrupts()
    is_main_thread = threading.current_thread() is threading.main_thread()
    if prepared.config.backup.save_freq != "never" and is_main_thread:
        # The Trainer takes over some seconds later, once TensorFlow is loaded.
        signal.signal(signal.SIGTERM, process_end.end_at_once)
    run = _import_run()

    def train_and_print() -> None:
        summary = run.train(prepared)
        if summary and prepared.is_chief and SOURCE not in os.environ:
            summary_table.print_summary(summary, str(prepared.workdir))

    code = process_end.run_to_the_end(train_and_print)
    if not code and prepared.resolved and not prepared.evaluator:
        progress.write(finished=True)
    return code


def launch(prepared: PreparedRun, argv: Sequence[str]) -> int:
    """Starts this command again for each task of a cluster, on this machine or on Ray's nodes; returns the exit code."""
    config, workdir = prepared.config, prepared.workdir
    logs = workdir.logs / "logs"
    if os.path.lexists(logs) and not logs.is_dir():
        raise ConfigError(
            f"{format_value(str(logs))} must be a folder for the tasks' output, and is a file: remove it, or choose another --workdir."
        )
    # The tasks get their cluster in TF_CONFIG, whatever the source is here.
    command = [sys.executable, "-m", "tfdist.train", *argv[1:]]
    workers = worker_range(config.cluster.workers)
    cluster = local_cluster(workers.most, config.cluster.ps)
    environ = {**os.environ, SOURCE: "tf_config", **workdir.for_tasks()}
    sizes = None
    if workers.is_elastic:
        sizes = Sizes(*workers, config.strategy.replicas, config.cluster.join_seconds)
    options = Options(
        command,
        cluster,
        logs,
        environ,
        grace_seconds=config.grace_seconds,
        max_restarts=config.max_restarts,
        evaluator=config.cluster.evaluator > 0,
        fresh_ports=True,
        must_finish=True,
        sizes=sizes,
        warm=config.cluster.warm > 0 and not config.cluster.ray,
    )
    host: Callable[..., Host] = Host
    if config.cluster.ray:
        host = ray_host(
            config.cluster.ray,
            config.cluster.ray_resources(),
            config.cluster.join_seconds,
            warm=config.cluster.warm > 0,
        )
    code = Launcher(options, host=host).run()
    if code == 0:
        summary_table.print_summary(workdir.read_json("summary.json") or {}, str(workdir))
    return code


def _import_run() -> Any:
    """Imports TensorFlow, Keras and `tfdist.training.run` without the garbage collector, which would take a second and free nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with tensorflow_log.filtered():
            return importlib.import_module("tfdist.training.run")
    finally:
        if enabled:
            gc.enable()
        gc.freeze()  # later collections skip these objects, too


if __name__ == "__main__":
    process_end.after_imports()
    exit_code = main(sys.argv)
    if "tensorflow" in sys.modules:
        process_end.leave(exit_code)
    sys.exit(exit_code)
