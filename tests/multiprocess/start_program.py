"""A task of a cluster, one of which comes to harm between the preflight and TensorFlow's server.

Arguments: the strategy, which task, how (`die`; `steal`: another program takes its port; `steal once`, in its first life; `no`),
start_timeout, and a folder for backups or nothing.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import psutil
import tensorflow as tf

import tfdist
from tfdist.cluster import from_tf_config, greeting, preflight
from tfdist.runtime.end import process_end
from tfdist.runtime.report import progress

THIEF = """
import os, socket, sys, time
server = socket.create_server(("", int(sys.argv[1])))
print("taken", flush=True)
while os.getppid() == int(sys.argv[2]):
    time.sleep(0.05)
"""
WATCHING = ("tfdist-start", "tfdist-signals")
strategy, lost, how, timeout, backups = sys.argv[1:]
cluster, task = from_tf_config(os.environ["TF_CONFIG"])
is_first = how != "steal once" or not progress.restarts()
set_action = process_end.set_action
wait, name_owner = preflight.wait_until_reachable, greeting.naming_port_owner


def wait_and_linger(*args, **kwargs):
    """Waits for the others, and then until they have found this task, which answers until then."""
    wait(*args, **kwargs)
    if strategy != "multi_worker_mirrored":
        return time.sleep(1)
    met = [pathlib.Path(os.environ["ROLES"], f"{each}{'' if is_first else ' again'}.met") for each in cluster.tasks()]
    met[cluster.tasks().index(task)].touch()
    ends = time.monotonic() + float(timeout)
    while not all(path.exists() for path in met):
        assert time.monotonic() < ends
        time.sleep(0.02)


def come_to_harm(*args):
    """Runs right before TensorFlow connects, or serves."""
    print("connects", flush=True)
    if str(task) == lost and how == "die":
        os._exit(0)
    if str(task) == lost and how.startswith("steal") and is_first:
        port = cluster.address(task).rpartition(":")[2]
        words = [sys.executable, "-S", "-c", THIEF, port, str(os.getpid())]
        thief = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
        assert thief.stdout.readline() == b"taken\n"
        print(f"thief {thief.pid}", flush=True)
    return name_owner(*args)


def tell_action(address):
    before = set_action(address)
    print("heeds SIGTERM", flush=True)
    return before


process_end.set_action = tell_action
preflight.wait_until_reachable, greeting.naming_port_owner = wait_and_linger, come_to_harm
trainer = tfdist.Trainer(strategy, start_timeout=float(timeout), backup_dir=backups or None)
total = trainer.strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0)))
ends = time.monotonic() + 10
while (left := [each.name for each in threading.enumerate() if each.name in WATCHING]) and time.monotonic() < ends:
    time.sleep(0.05)
left += [str(each.cmdline()) for each in psutil.Process().children()]
print(json.dumps([float(total), left, signal.getsignal(signal.SIGINT) is signal.default_int_handler]), flush=True)
