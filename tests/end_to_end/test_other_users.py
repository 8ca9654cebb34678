"""Attacks by another user of this host, each in a private /tmp: they stop no launch, join no meeting, and steer no file.

Rows are: what nobody has put there, the command that root runs then, its exit code, and what stands in the output.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers.unprivileged import NOBODY

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = sys.executable
# The folder of the tests may itself lie in /tmp.
PRIVATE = 'mount -t tmpfs -o mode=1777 tmpfs /tmp && mkdir -p "$1" && mount --no-canonicalize --bind . "$1" && cd "$1" && exec bash -c "$2"'
SETUP = f"""
as_nobody() {{ setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups "$@"; }}
echo precious > /tmp/victim; mkdir /tmp/victims; echo precious > /tmp/victims/file; before=$(stat -c %Y%i /tmp/victim /tmp/victims)
mkdir -m 0777 /tmp/work
"""
END = """
echo "code $?"; cat /tmp/victim /tmp/victims/file; ls -A /tmp/victims
[ "$before" = "$(stat -c %Y%i /tmp/victim /tmp/victims)" ] && echo untouched
"""
LAUNCH = f"{PYTHON} -m tfdist launch --workers=2 --log_dir=/tmp/logs -- echo trained"
TRAIN = f"{PYTHON} -m tfdist train --config=digits --workdir=/tmp/work --config.epochs=1 --config.steps_per_epoch=2"
TWO = "--config.cluster.workers=2 --config.strategy.name=multi_worker_mirrored"
# A launch whose log folder another user has prepared.
LOGS = "mkdir -m 0777 /tmp/logs; as_nobody bash -c 'cd /tmp/logs; {}'"
LOCKS = f"""
cat > /tmp/locks.py <<'END'
import fcntl, os, pathlib, time
os.mkdir("/tmp/.tfdist-0", 0o777)
os.chmod("/tmp/.tfdist-0", 0o777)
file = os.open(f"/tmp/.tfdist-0/ports-{{os.stat('/proc/self/ns/net').st_ino}}", os.O_RDWR | os.O_CREAT, 0o666)
os.fchmod(file, 0o666)
fcntl.lockf(file, fcntl.LOCK_EX)
pathlib.Path("/tmp/locked").touch()
time.sleep(600)
END
as_nobody {PYTHON} /tmp/locks.py &
until [ -e /tmp/locked ]; do sleep 0.02; done
"""
# Tries to enter, to read and to move whatever it finds, until it is ended; says what has worked.
MEETING = f"""
cat > /tmp/join.py <<'END'
import glob, os, pathlib, socket
pathlib.Path("/tmp/attacks").touch()
while True:
    for path in glob.glob("/tmp/tfdist-*"):
        each = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for name, attack in {{
            "listed": lambda: os.listdir(path),
            "joined": lambda: each.connect(path + "/socket"),
            "moved": lambda: os.rename(path, "/tmp/moved"),
            "removed": lambda: os.rmdir(path),
        }}.items():
            try:
                attack()
                print(name, path, flush=True)
            except OSError:
                pathlib.Path("/tmp/tried").touch()
        each.close()
END
as_nobody {PYTHON} /tmp/join.py &
until [ -e /tmp/attacks ]; do sleep 0.02; done
mkdir -m 700 /tmp/store
"""
RANK = f"{PYTHON} tests/collectives/shared_memory_rank.py /tmp/store"
MEET = f"({RANK} 0 3 ends '{{}}' & {RANK} 1 3 ends '{{}}' & (until [ -e /tmp/tried ]; do sleep 0.02; done; {RANK} 2 3 ends '{{}}'); wait)"


def planted(*commands: str) -> str:
    return "as_nobody bash -c 'cd /tmp/work; " + "; ".join(commands) + "'"


def refused(found: str) -> list[str]:
    return ["code 2", found]


ROWS = {
    "ports: a folder of nobody's, with all locks": (LOCKS, LAUNCH, ["code 0", "[worker:1] trained"]),
    "ports: a link": ("as_nobody ln -s /tmp/victims /tmp/.tfdist-0", LAUNCH, ["code 0", "[worker:1] trained"]),
    "ports: a FIFO": ("as_nobody mkfifo /tmp/.tfdist-0", LAUNCH, ["code 0", "[worker:1] trained"]),
    "temporary folders: links and locks": (
        'as_nobody ln -s /tmp/victims "/tmp/tfdist-$(hostname)-a"; as_nobody mkdir "/tmp/tfdist-$(hostname)-b"',
        f'{LAUNCH} && [ -d "/tmp/tfdist-$(hostname)-b" ]',
        ["code 0", "[worker:1] trained"],
    ),
    "logs: a link": (LOGS.format("ln -s /tmp/victim worker-1.log"), LAUNCH, ["code 0", "[worker:1] trained"]),
    "logs: a FIFO": (LOGS.format("mkfifo worker-1.log"), LAUNCH, ["code 0", "[worker:1] trained"]),
    "logs: a folder": (LOGS.format("mkdir worker-1.log"), LAUNCH, ["code 0", "[worker:1] trained"]),
    "meeting": (MEETING, MEET, ["code 0", "done"]),
    "workdir: FIFOs": (
        planted(*(f"mkfifo {name}" for name in ("config.json", "config.json.partial", "goodput.bin", "run"))),
        TRAIN,
        ["code 0", "loss"],
    ),
    "workdir: partial files as links": (
        planted(*(f"ln -s /tmp/victim {name}.partial" for name in ("config.json", "goodput.bin", "summary.json"))),
        f"{TRAIN}",
        refused("is a symbolic link of user 65534, through which the run would write elsewhere: remove it"),
    ),
    "workdir: another name of a file": (
        "ln /tmp/victim /tmp/work/run",  # the kernel may let nobody do so
        TRAIN,
        refused("expected a regular file, and found one with another name; remove it"),
    ),
    "workdir: a folder as a link": (
        planted("ln -s /tmp/victims logs"),
        f"{TRAIN} {TWO}",
        refused("'/tmp/work/logs' is a symbolic link of user 65534"),
    ),
    "workdir: a FIFO as logs": (
        planted("mkfifo logs"),
        f"{TRAIN} {TWO}",
        refused("'/tmp/work/logs' must be a folder for the tasks' output, and is a file"),
    ),
    "workdir: a lock of nobody's": (
        planted(
            "touch run",
            "chmod 666 run",
            "flock run touch locked; flock run sleep 600 & until [ -e locked ]; do sleep 0.02; done",
        ),
        TRAIN,
        refused("expected a regular file, and found one of user 65534; remove it, if it is not in use"),
    ),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("name", ROWS)
def test_another_user_stops_nothing_and_steers_no_file(name):
    before, command, words = ROWS[name]
    environ = {key: value for key, value in os.environ.items() if key not in ("TMPDIR", "TF_CONFIG")}
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            PRIVATE,
            "sh",
            str(ROOT),
            f"{SETUP}{before}\n{command}{END}",
        ],
        cwd=ROOT,
        env=environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert not [word for word in [*words, "precious\nprecious\nfile\nuntouched\n"] if word not in done.stdout], (
        done.stdout
    )
    assert "Traceback" not in done.stdout
    assert not [word for word in ("listed", "joined", "moved", "removed") if f"{word} /tmp" in done.stdout], done.stdout
