"""`--chaos`: its text, and what happens to jobs of small scripts and to real trainings."""

from __future__ import annotations

import re
import signal

import pytest

from tests.helpers.launched_job import until
from tfdist.cluster import TaskSpec, local_cluster
from tfdist.errors import ConfigError
from tfdist.launch import chaos

TRAINING = """
import hashlib, keras, numpy as np, tfdist
trainer = tfdist.Trainer("multi_worker_mirrored", backup=tfdist.BackupAndRestore("backup", save_freq=20))
keras.utils.set_random_seed(3)
x = np.random.default_rng(0).uniform(-1, 1, (640, 4))
with trainer.scope():
    model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    model.compile("adam", "mse")
trainer.fit(model, x, x.sum(axis=1), batch_size=16, epochs=5, verbose=0)
if trainer.is_chief:
    say("weights " + hashlib.sha256(b"".join(each.tobytes() for each in model.get_weights())).hexdigest())
trainer.save(model, "model.keras")
"""

# A training that saves every tenth step: `train(last)` trains up to `last` from the step that another life has saved.
TRAIN = """
from tfdist.runtime.progress import Progress
LIFE = int(pathlib.Path(os.environ['TFDIST_PROGRESS'], 'restarts').read_text())
tell, saved = Progress(f"{TASK['type']}-{TASK['index']}").write, pathlib.Path("saved")
def train(last, total=0):
    begin = int(saved.read_text()) if saved.exists() else 0
    tell(begin, begin, epoch=1, total=total)
    for step in range(begin + 1, last + 1):
        tell(step)
        if step % 10 == 0:
            saved.with_suffix(".new").write_text(str(step))
            saved.with_suffix(".new").replace(saved)
            tell(saved=step)
def await_output(text):
    while text not in pathlib.Path("out").read_text():
        time.sleep(0.01)
"""


def outcomes(job) -> list[str]:
    """Returns what the launcher has reported of each event."""
    return re.findall(r"^tfdist: chaos: (\S+ (?:happened|never).*|random:.*drew.*)$", job.output(), re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kil:worker:1@3", "unknown event 'kil'; did you mean 'kill'? Known: kill, random, stop, term."),
        ("kill:worker:1@3,,", "'': unknown event ''. Known: "),
        ("kill:worker:2@3", "unknown task 'worker:2'; did you mean 'worker:1'? Known: launcher, worker:0, worker:1."),
        ("kill:worker:1", "the event needs a step, as @120, or a time after the start, as @30s. Received: ''."),
        ("kill:worker:1@-3", "the event needs a step, as @120, or a time after the start, as @30s. Received: '-3'."),
        ("kill:worker:1@1e9", "as @30s. Received: '1e9'."),
        ("stop:worker:0@200", "a stop needs its duration, as stop:worker:0@200+10s. Received: ''."),
        ("stop:worker:0@200+10", "a stop needs its duration, as stop:worker:0@200+10s. Received: '10'."),
        ("term:worker:0@200+10s", "only stop has a duration; leave out +10s."),
        ("stop:launcher@3+1s", "a stopped launcher could not continue; use kill:launcher or term:launcher"),
        ("random:x", "'random:x': the seed must be a whole number, as random:7."),
        ("random", "'random': the seed must be a whole number, as random:7."),
        ("kil:worker:0@1, stop:worker:7@x", "Received: 'x'.\n--chaos: 'stop:worker:7@x': a stop needs its duration"),
    ],
)
def test_every_problem_of_a_text_is_reported_at_once(text, told):
    with pytest.raises(ConfigError, match="--chaos: ") as error:
        chaos.parse(text, local_cluster(2))
    assert told in str(error.value)


def test_a_launcher_on_another_host_than_the_chief_of_parameter_servers_takes_times_alone():
    cluster, here = local_cluster(2, 1), [TaskSpec("worker", 1)]
    with pytest.raises(ConfigError) as error:
        chaos.parse("kill:worker:1@3, kill:chief:0@3, kill:worker:1@3s, random:7", cluster, here)
    assert [fault.partition(": the chief runs on another host")[0] for fault in error.value.faults] == [
        "--chaos: 'kill:worker:1@3'",
        "--chaos: 'random:7'",
    ]


def test_a_seed_draws_the_same_events_for_every_launcher():
    tasks = ["worker:0", "worker:1"]
    drawn = [list(map(str, chaos.draw(seed, tasks, 200))) for seed in range(100)]
    assert [list(map(str, chaos.draw(seed, tasks, 200))) for seed in range(100)] == drawn
    assert {len(events) for events in drawn} == {1, 2, 3}
    assert {event.partition(":")[0] for events in drawn for event in events} == {"kill", "stop", "term"}
    cluster = local_cluster(2)
    for events in drawn:
        chaos.parse(", ".join(events), cluster)
    assert [str(event) for event in chaos.draw(3, tasks, 1)]


def test_an_unknown_task_ends_the_command_before_anything_starts(job):
    assert job.run("", "--workers=2", "--chaos=kill:worker:2@3", "--log_dir=new") == 2
    assert "--chaos: 'kill:worker:2@3': unknown task 'worker:2'" in job.output()
    assert not (job.folder / "new").exists()


def test_each_event_happens_once_and_its_outcome_is_reported(job):
    # worker:1 trains no steps, and the first two lives wait for their end, as in a collective.
    code = f"""{TRAIN}
if TASK["index"] == 0:
    train((12, 15, 19)[LIFE])
    pathlib.Path("all").write_text("trained") if LIFE == 2 else sleep_for_ever()
await_file("all")
"""
    events = "kill:worker:1@12, stop:worker:1@15+1s, kill:worker:0@15, term:worker:1@900, kill:worker:1@800s"
    assert job.run(code, "--workers=2", "--max_restarts=3", f"--chaos={events}") == 0
    output = job.output()
    assert "tfdist: worker:1 lost at step 12 (killed by SIGKILL); restart 1/3 from step 10." in output
    assert re.findall("^tfdist: chaos: ([ks].*? at step .*)", output, re.MULTILINE)[:3] == [
        "killed worker:1 at step 12",
        "stopped worker:1 for 1 s at step 15",
        "killed worker:0 at step 15",
    ]
    assert [re.sub(r"\d+\.\d s", "S s", line) for line in outcomes(job)] == [
        "kill:worker:1@12 happened at step 12; S s later the job trained on, from step 10 (2 steps repeated)",
        "stop:worker:1@15+1s happened at step 15; S s later the job trained on, from step 10 (5 steps repeated)",
        "kill:worker:0@15 happened at step 15; S s later the job trained on, from step 10 (5 steps repeated)",
        "term:worker:1@900 never happened: the job ended at step 19",
        "kill:worker:1@800s never happened: the job ended after S s",
    ], output


def test_a_stopped_task_continues(job):
    code = f"{TRAIN}\ntrain(5)\nawait_output('worker:0 continues')\ntell(6)"
    assert job.run(code, "--chaos=stop:worker:0@5+1s") == 0
    (told,) = outcomes(job)
    assert re.fullmatch(
        r"stop:worker:0@5\+1s happened at step 5; [1-9]\d*\.\d s later the job trained on, from step 5", told
    )


@pytest.mark.parametrize(
    ("script", "event", "code", "told"),
    [
        ("train(5)\nsleep_for_ever()", "kill:worker:0@5", 137, "happened at step 5; the job ended with exit code 137"),
        (
            "signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\ntrain(5)\nsleep_for_ever()",
            "term:worker:0@5",
            75,
            "happened at step 5; the job ended with exit code 75",
        ),
        (
            "signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\ntrain(5)\nsleep_for_ever()",
            "term:launcher@5",
            75,
            "happened at step 5; the job ended with exit code 75",
        ),
        (
            "train(5)\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit())\nsleep_for_ever()",
            "term:worker:0@5",
            0,
            "happened at step 5; the job ended with exit code 0, without another step",
        ),
        (
            "sleep_for_ever()",
            "kill:worker:0@0.2s",
            137,
            "happened before the first step; the job ended with exit code 137",
        ),
        ("sys.exit(3)", "kill:worker:0@5", 3, "never happened: the job ended before its first step"),
        (
            "saved.write_text('20')\ntrain(25)",
            "kill:worker:0@5",
            0,
            "never happened: the training continued from step 20",
        ),
        (
            "train(5, total=0)",
            "random:7",
            0,
            r"random:7 drew no event: the training reported no total number of steps to this launcher\. Name the events.*",
        ),
    ],
)
def test_the_outcome_of_one_event(job, script, event, code, told):
    assert job.run(f"{TRAIN}\n{script}", f"--chaos={event}") == code, job.output()
    (line,) = outcomes(job)
    assert re.fullmatch(told, line.removeprefix(f"{event} ") if not told.startswith("random") else line), line


def test_the_events_of_a_seed_are_printed_as_they_can_be_repeated(job):
    assert job.run(
        f"{TRAIN}\ntrain(30, total=30)\nawait_output('random:7 is')", "--max_restarts=9", "--chaos=random:7"
    ) in (0, 143)
    expected = ", ".join(map(str, chaos.draw(7, ["worker:0"], 30)))
    assert f'tfdist: chaos: random:7 is --chaos="{expected}"' in job.output()
    assert [line.split(" ")[0] for line in outcomes(job)] == expected.split(", ")


def test_a_killed_launcher_leaves_its_message_and_no_process(job):
    process = job.start(f"{TRAIN}\ntrain(5)\nsleep_for_ever()", "--workers=2", "--chaos=kill:launcher@5")
    assert process.wait(60) == -signal.SIGKILL
    assert re.search(r"tfdist: chaos: killed launcher at step 5\n", job.output())
    until(lambda: not job.alive())


def test_a_launcher_leaves_events_of_tasks_of_other_hosts_to_theirs(job):
    flags = ["--hosts=h1,h2", "--task=worker:1", "--chaos=kill:worker:0@5, kill:worker:1@5"]
    assert job.run(f"{TRAIN}\ntrain(5)\nsleep_for_ever()", *flags) == 137
    assert [line.partition(" ")[0] for line in outcomes(job)] == ["kill:worker:1@5"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "restarts"), [(0, 3), (1, 3), (2, 0), (3, 0), (7, 3)])
def test_a_training_ends_with_the_same_weights_or_with_an_error(job, seed, restarts):
    flags = ["--workers=2", f"--max_restarts={restarts}"]
    assert job.run(TRAINING, *flags, "--log_dir=undisturbed") == 0, job.output()
    (expected,) = re.findall(r"weights (\w{64})$", job.output(), re.MULTILINE)
    code = job.run(TRAINING, *flags, f"--chaos=random:{seed}")
    output = job.output()
    assert f"tfdist: chaos: random:{seed} is --chaos=" in output
    assert any(" happened at step " in line for line in outcomes(job)), output
    if code:
        told = r"^tfdist: (?:worker:\d (?:was killed by SIG|failed with exit code).*; ending all tasks|Run the same command again to continue)"
        assert re.search(told, output, re.MULTILINE), output
        assert job.run(TRAINING, *flags) == 0, job.output()
    assert re.findall(r"weights (\w{64})$", job.output(), re.MULTILINE) == [expected], output
