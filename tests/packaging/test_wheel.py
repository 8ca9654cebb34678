"""A wheel that is built here, installed into an empty environment in another folder, and used by a user whose home is read-only."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from tests.helpers.unprivileged import NOBODY, open_folder
from tfdist.version import __version__

pytestmark = pytest.mark.full

ROOT = pathlib.Path(__file__).parents[2]
PLUGINS = pathlib.Path(__file__).parent / "plugins"
TWO_STEPS = ("--config.epochs=1", "--config.steps_per_epoch=2")
# Another user, who may read all, as the interpreter may lie in root's home, and write what everyone may.
AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)


def build(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Returns the wheel of a source tree; needs no network."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--check-build-dependencies"]
    command += ["--no-deps", "--no-index", "--disable-pip-version-check", f"--wheel-dir={folder}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def folder():
    with open_folder() as path:
        yield path


@pytest.fixture(scope="module")
def wheel(folder):
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tfdist", source / "tfdist", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return build(source, folder / "wheel")


@pytest.fixture(scope="module")
def plugins_wheel(folder):
    shutil.copytree(PLUGINS, folder / "plugins", ignore=shutil.ignore_patterns("__pycache__"))
    return build(folder / "plugins", folder / "plugins_wheel")


@pytest.fixture(scope="module")
def run(folder, wheel, plugins_wheel):
    """Returns a function that runs a command of the environment in an empty folder."""
    environment, home, empty = folder / "environment", folder / "home", folder / "empty"
    venv.create(environment, symlinks=True)
    pip = [sys.executable, "-m", "pip", f"--python={environment}/bin/python", "--disable-pip-version-check", "install"]
    command = [*pip, "--no-deps", "--no-index", str(wheel), str(plugins_wheel)]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert installed.returncode == 0, installed.stderr
    # What tfdist depends on. A path that a .pth file names is no place whose own .pth files count, such as that of this tree.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    home.mkdir(mode=0o555)
    empty.mkdir()
    empty.chmod(0o777)
    kept = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(empty), "TF_CPP_MIN_LOG_LEVEL": "2"}

    def run(*words: str, timeout: float = 240, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [*(AS_NOBODY if os.geteuid() == 0 else ()), str(environment / "bin" / words[0]), *words[1:]]
        return subprocess.run(
            command, cwd=empty, env=kept | environ, capture_output=True, text=True, timeout=timeout, errors="replace"
        )

    return run


def summary(workdir: pathlib.Path) -> dict:
    return json.loads((workdir / "summary.json").read_text())


def test_the_wheel_holds_the_package_and_its_data_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"tfdist-{__version__}-py3-none-any.whl"
    assert {name.split("/")[0] for name in names} == {"tfdist", f"tfdist-{__version__}.dist-info"}
    of_tree = (path.relative_to(ROOT) for path in (ROOT / "tfdist").rglob("*") if path.is_file())
    assert {str(path) for path in of_tree if path.suffix != ".pyc"} <= set(names)


def test_the_version_stands_in_one_file(run):
    code = "import importlib.metadata as m, tfdist; print(m.version('tfdist'), tfdist.__version__, tfdist.__file__)"
    installed, own, file = run("python", "-c", code).stdout.split()
    assert installed == own == __version__ and "environment" in file
    assert not [name for name in ("pyproject.toml", "CITATION.cff") if __version__ in (ROOT / name).read_text()]


def test_a_wheel_trains_in_another_folder_as_a_user_without_a_home(run, folder):
    done = run("tfdist", "train", "--config=digits_multi_worker", *TWO_STEPS, f"--workdir={folder}/empty/run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(folder / "empty/run")["cluster"] == {"worker": 2}
    if os.geteuid() == 0:
        assert (folder / "empty/run/model.keras").stat().st_uid == NOBODY


def test_an_installed_task_and_compressor_train(run, folder):
    names = ("--config.task=little", "--config.task_options.units=3", "--config.compression.name=little")
    options = ("--config.compression.factor=2", f"--workdir={folder}/empty/plugins")
    done = run("tfdist", "train", "--config=digits_mirrored", *TWO_STEPS, *names, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    written = summary(folder / "empty/plugins")
    assert written["task"] == "little" and written["compression"]["name"] == "little"
    assert json.loads((folder / "empty/plugins/config.json").read_text())["task_options"] == {"units": 3}


def test_faults_of_installed_names_are_found_before_tensorflow_is_loaded(run):
    done = run("tfdist", "train", "--config=digits", "--config.task=litle", "--config.compression.name=torn")
    assert done.returncode == 2, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "Unknown task 'litle'; did you mean 'little'?" in said
    assert "The module of compression 'torn' of distribution tfdist-little 2.5 cannot be imported: ModuleNot" in said


def test_an_installed_resolver_tells_of_the_cluster(run):
    variables = {"LITTLE_HOSTS": "127.0.0.1:5001,127.0.0.1:5002", "LITTLE_RANK": "1"}
    done = run("tfdist", "cluster", "show", "--format=json", **variables)
    shown = json.loads(done.stdout)
    assert shown["source"] == "little" and shown["task"] == {"type": "worker", "index": 1}
    none = run("tfdist", "cluster", "show")
    assert "TFDIST_PODS, LITTLE_HOSTS.)" in none.stdout


TYPED = """
import tfdist

trainer = tfdist.Trainer("mirrored", compression="topk", start_timeout=60.0)
with trainer.scope():
    reveal_type(trainer.num_replicas)
config = tfdist.TrainConfig(task="digits", epochs=2)
found = tfdist.find_cluster(ps=1)
if found is not None:
    reveal_type(found.cluster)
    found.cluster.address(tfdist.TaskSpec("worker", 0)).upper()
"""


@pytest.mark.parametrize(
    ("more", "faults"),
    [
        ("", []),
        (
            "tfdist.Trainer('mirrored', start_timeout='soon')",
            ['Argument "start_timeout" to "Trainer" has incompatible'],
        ),
        ("config.epochs = 'two'", ["Incompatible types in assignment"]),
        ("found.cluster", ['Item "None" of "ClusterTask | None" has no attribute "cluster"']),
    ],
    ids=["sound", "argument", "field", "none"],
)
def test_a_users_types_are_checked_against_the_wheel(folder, run, more, faults):
    del run  # has installed it
    snippet = folder / "empty/snippet.py"
    snippet.write_text(TYPED + more + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", f"--python-executable={folder}/environment/bin/python"]
    command += [f"--cache-dir={folder}/mypy", "--config-file=", str(snippet)]
    done = subprocess.run(command, cwd=folder / "empty", capture_output=True, text=True, timeout=240)
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == len(faults) and all(f in e for f, e in zip(faults, errors, strict=True)), done.stdout
    assert 'Revealed type is "int"' in done.stdout.replace("builtins.", "")
    assert "tfdist.cluster.spec.ClusterSpec" in done.stdout
