"""A job that loses a worker goes on with fewer, and has all again after its next backup; small scripts stand for trainings."""

import pytest

from tests.helpers.launched_job import PROGRESS
from tfdist.cluster import local_cluster
from tfdist.launch.sizes import Sizes

# Worker 3 is killed at its start while the file `away` exists, as on a machine without memory for it. Each training goes on from
# the last backup, and saves when told to end.
SCRIPT = (
    PROGRESS
    + """
workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
index, away, backup = TASK["index"], pathlib.Path("away"), pathlib.Path("backup")
step = int(backup.read_text()) if backup.exists() else 0
tell = progress.write
def leave(*_):
    if index == 0:
        backup.write_text(str(step))
    os._exit(75)
signal.signal(signal.SIGTERM, leave)
tell(saved=step, done=step)
if index == 0:
    say(f"{workers} workers and {os.environ['TFDIST_REPLICAS']} replicas from step {step}")
if index == 3 and away.exists():
    os.kill(os.getpid(), signal.SIGKILL)
while step < 60:
    time.sleep(0.02)
    if index == 3 and step >= 15 and not pathlib.Path("lost").exists():
        pathlib.Path("lost").touch()
        away.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if index == 0 and workers == 4 and step >= 15 and (away.exists() or not pathlib.Path("lost").exists()):
        continue
    step += 1
    if index == 0 and step % 10 == 0:
        if workers == 2:
            away.unlink(missing_ok=True)
        backup.write_text(str(step))
        tell(done=step, saved=step)
    tell(done=step)
if index == 0:
    say(f"{workers} workers end")
"""
)


@pytest.mark.parametrize(
    "flags",  # the time to join: test_sizes.py
    [("--max_restarts=0",), pytest.param(("--max_restarts=9", "--join_seconds=1.5"), marks=pytest.mark.full)],
)
def test_a_job_of_four_goes_on_with_two_and_grows_back(job, flags):
    assert job.run(SCRIPT, "--workers=1:4", *flags) == 0
    said = job.output().splitlines()
    starts = [line.removeprefix("[worker:0] ") for line in said if "replicas from step" in line]
    assert starts[0] == "4 workers and 4 replicas from step 0"
    sizes = [int(line.split()[0]) for line in starts]
    assert [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before] == [4, 2, 4], said
    told = [line for line in said if line.startswith("tfdist: ")]
    assert any("lost" in line and "continuing with 2 of 4 workers from step" in line for line in told), told
    assert any("is complete; starting again with 4 workers instead of 2" in line for line in told), told
    assert said[-1] == "[worker:0] 4 workers end"


@pytest.mark.full  # those of each restart: test_warm.py
def test_the_tasks_of_each_size_come_from_the_spare(job):
    script = """
import tfdist
if TASK["index"] == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]) == 2:
    sleep_for_ever()
say(f"TensorFlow is here: {'tensorflow' in sys.modules}")  # `import tfdist` alone does not import it
"""
    assert job.run(script, "--workers=1:2") == 0
    assert "[worker:0] TensorFlow is here: True" in job.output().splitlines()


@pytest.mark.parametrize(
    ("script", "status", "shrinks"), [("sys.exit(7)", 7, False), ("os.kill(os.getpid(), signal.SIGKILL)", 137, True)]
)
def test_an_exception_of_the_program_changes_no_size_and_the_loss_of_the_last_worker_ends_the_job(
    supervise, script, status, shrinks
):
    exit_code, output = supervise(script, local_cluster(2), sizes=Sizes(1, 2))
    assert exit_code == status
    assert ("continuing with 1 of 2 workers from step 0" in output) == shrinks
