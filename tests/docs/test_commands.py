"""Each command of the pages runs as it stands there, in a folder that has the files which pages show; or a test that it names runs it.

A training is cut to two steps. `make test` starts the README's script on two workers, and test_pages.py parses all others there;
`make test-all` runs them.
"""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest

from tests.docs.pages import PAGES, ROOT, commands
from tests.helpers import tiers
from tfdist.cluster import free_ports

COMMANDS = list(dict.fromkeys(command.text for command in commands()))
END_TO_END = "tests/end_to_end/"
# What runs the same with a cluster around it, and is too much for a page's test, runs there.
ELSEWHERE = {
    "python -m pytest my_task": END_TO_END + "test_starters.py::test_a_copy_of_the_example_passes_its_tests",
    "sbatch slurm/my_task.sh": END_TO_END + "test_starters.py::test_slurm_trains_what_its_job_says",
    "make demo": END_TO_END + "test_train.py::test_main_job_reaches_its_accuracy_and_says_so",
    "make test": "tests/docs/test_commands.py::test_what_make_is_told_is_a_target",
    "srun -n 4 tfdist train": END_TO_END + "test_schedulers.py::test_srun_trains",
    "mpirun -np 4 tfdist train": END_TO_END + "test_schedulers.py::test_mpirun_trains",
    "sbatch job.sh": END_TO_END + "test_schedulers.py::test_the_script_runs_as_it_is_and_goes_on_after_sigterm",
}
HOSTS = [
    command for command in COMMANDS if re.match(r"tfdist (train|launch) .*--hosts=", command)
]  # several processes: a test of their own, below
BEGIN = tuple(f"{begin} " for begin in ELSEWHERE)
OF_EXAMPLES = [command for command in COMMANDS if " examples/" in command]  # test_examples.py runs those of headers
RUN = [command for command in COMMANDS if command not in HOSTS + OF_EXAMPLES and not f"{command} ".startswith(BEGIN)]
QUICK = {"tfdist launch --workers=2 -- python script.py"}
TWO_STEPS = " --config.epochs=1 --config.steps_per_epoch=2"


def start(command: str, folder: pathlib.Path) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_CONFIG", "SLURM_", "OMPI_"))}
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environ = {**kept, "PYTHONPATH": str(ROOT), "PATH": path}
    return subprocess.Popen(["timeout", "280", "sh", "-c", command], cwd=folder, env=environ, **both)


def adapt_script(command: str, folder: pathlib.Path) -> None:
    """Writes the strategy of servers in the script, as laptop.md and parameter-servers.md say to."""
    if "--ps" in command:
        script = folder / "script.py"
        script.write_text(script.read_text().replace('"multi_worker_mirrored"', '"parameter_server"'))


@pytest.mark.parametrize("command", tiers.cases(RUN, QUICK))
def test_commands_run(command, folder):
    adapt_script(command, folder)
    trains = "tfdist train" in command and "--help" not in command and "emit" not in command
    process = start(command + TWO_STEPS * trains, folder)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    if trains:
        workdir = folder / re.search(r"--workdir=(\S+)", command)[1]
        assert json.loads((workdir / "summary.json").read_text())["steps"] == 2
    elif "script.py" in command:
        assert (folder / "model.keras").exists(), output
        if "multi_worker" in (folder / "script.py").read_text():
            (said,) = re.findall(r"an accuracy of (\d\.\d\d)", PAGES["README.md"])
            # Before 3.16, Keras shuffles arrays by the seed.
            assert f"{float(re.findall(r'accuracy: (.*?) ', output)[-1]):.2f}" == said or keras.__version__ >= "3.16"
        workers = int(found[1]) if (found := re.search(r"--workers=(\d+)", command)) else 1
        assert re.search(
            rf"{'parameter_server' if '--ps=' in command else 'multi_worker_mirrored'}: {workers} ", output
        )
    elif written := re.search(r"> (\S+)$", command):
        assert "tfdist.train" in (folder / written[1]).read_text()
    else:
        assert output.strip()


@pytest.mark.full
@pytest.mark.parametrize("command", dict.fromkeys(command.partition(" --task=")[0] for command in HOSTS))
def test_commands_of_several_hosts_run(command, folder):
    """Each process is told its tasks, as `ps:0` is in the page, and the hosts are ports of this machine."""
    adapt_script(command, folder)
    tasks = ["chief:0", "worker:0", "ps:0"] if "--ps_hosts" in command else ["worker:0", "worker:1"]
    if "--workers_per_host=2" in command:
        tasks = ["worker:0,worker:1", "worker:2,worker:3"]
    named = {each.partition(" --task=")[2] for each in HOSTS if each.startswith(f"{command} --task=")}
    assert named <= set(tasks), "the page names a task that is not run here"
    hosts = [host for listed in re.findall(r"hosts=(\S+)", command) for host in listed.split(",")]
    local = command
    for host, port in zip(hosts, free_ports(len(hosts)), strict=True):
        local = re.sub(rf"(?<=[=,]){host}(?=[, ]|$)", f"127.0.0.1:{port}", local)
    trains = command.startswith("tfdist train")
    more = f" --workdir=run {TWO_STEPS}" * trains
    own = [re.sub("^tfdist (train|launch)", rf"\g<0> --task={task}", local) + more for task in tasks]
    processes = [start(command, folder) for command in own]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(tasks), outputs
    if trains:
        assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 2
    else:
        assert (folder / "model.keras").exists()
        assert re.search(r"multi_worker_mirrored: [24] replicas|parameter_server: 1 worker", "".join(outputs)), outputs


@pytest.mark.parametrize("command", OF_EXAMPLES)
def test_commands_of_examples_are_those_of_their_headers(command):
    (script,) = re.findall(r" (examples/\S+)", command)
    assert re.search(rf"^    {re.escape(command)}(\s+#.*)?$", (ROOT / script).read_text(), re.MULTILINE)


@pytest.mark.parametrize("begin", ELSEWHERE)
def test_commands_that_run_elsewhere_do(begin):
    assert any(f"{command} ".startswith(f"{begin} ") for command in COMMANDS), f"no page has {begin} any more"
    path, _, name = ELSEWHERE[begin].partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_what_make_is_told_is_a_target():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    told = {target for text in PAGES.values() for target in re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE)}
    assert {"demo", "test"} <= told <= targets


def test_the_demo_is_the_job_that_its_test_runs():
    (target,) = re.findall(r"^demo:.*\n\t\$\(BIN\)/(.*) --workdir", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target == "tfdist train --config=digits_multi_worker"
    assert '"--config=digits_multi_worker"' in (ROOT / END_TO_END / "test_train.py").read_text()


def test_commands_are_run_or_say_where():
    """What is new in a page fails here, unless it is tfdist's or the reader's script, which test_commands_run runs."""
    other = [command for command in RUN if not command.startswith(("tfdist ", "python script.py"))]
    assert not other, "mark its block as shown only, or name the test that runs it in ELSEWHERE"
    assert set(RUN) >= QUICK, "a page no longer has these"
