"""Imports point downward only, and the ground floor loads no TensorFlow."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tfdist import __main__

ROOT = pathlib.Path(__file__).parents[2]

# From the bottom to the top: a package imports only packages of lower rows. `tfdist` is its face, `__main__` a command.
ROWS = [
    {"engine", "errors", "version", "runtime"},
    {"cluster", "compat", "config"},
    {"cluster.resolvers", "collectives", "data", "launch", "replicas"},
    {"cluster.jobs", "compression", "doctor", "strategies", "tasks"},
    {"backup", "gradients", "presets"},
    {"monitoring", "step"},
    {"parameter_server", "training"},
    {"commands", "__main__", "train", "tfdist"},
]
# These, with what is in them, import no TensorFlow, or do it inside the functions that need it.
WITHOUT_TENSORFLOW = {
    "errors",
    "version",
    "runtime",
    "config",
    "cluster",
    "doctor",
    "launch",
    "presets",
    "tasks",
    "commands",
    "train",
    "__main__",
    "tfdist",
}
TENSORFLOW = {"tensorflow", "keras", "tf_keras", "tensorboard"}

TFDIST = ["-m", "tfdist"]
# Each command with what it needs before its flags, none of which starts anything.
WORDS = [
    ["train", "--config=digits"],
    ["launch"],
    ["cluster", "show"],
    ["cluster", "check"],
    ["cluster", "emit", "--target=slurm", "--config=digits", "--workdir=unused"],
    ["backup", "show", "docs"],
    ["backup", "export", "docs", "unused.keras"],
    ["doctor"],
    ["new-task", "unused"],
]


def modules() -> dict[str, pathlib.Path]:
    found = {}
    for path in (ROOT / "tfdist").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def imports(node: ast.AST, at_import_only: bool) -> Iterator[str]:
    """Yields the modules that a module imports; those under TYPE_CHECKING are for the type checker alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from imports(ast.Module([other], []), at_import_only)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative import"
            for alias in child.names:
                submodule = f"{child.module}.{alias.name}"
                yield submodule if submodule in MODULES else str(child.module)
        elif not (at_import_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))):
            yield from imports(child, at_import_only)


def imported(module: str, at_import_only: bool = False) -> set[str]:
    return set(imports(ast.parse(MODULES[module].read_text()), at_import_only))


def row(module: str) -> tuple[int, str]:
    """Returns the row of a module's package, and the package."""
    name = module.removeprefix("tfdist.")
    while name:
        for number, packages in enumerate(ROWS):
            if name in packages:
                return number, name
        name = name.rpartition(".")[0]
    raise AssertionError(f"give the package of {module} its place in ROWS")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_downward(module):
    mine, package = row(module)
    for name in imported(module):
        if name.split(".")[0] == "tfdist":
            other, its = row(name)
            assert its == package or other < mine, f"{module} imports {name}, of row {other + 1} from row {mine + 1}"


def test_no_modules_import_each_other_in_a_circle():
    pending = {module: imported(module) & MODULES.keys() - {module} for module in MODULES}
    while free := {module for module, others in pending.items() if not others & pending.keys()}:
        pending = {module: others for module, others in pending.items() if module not in free}
    assert not pending


@pytest.mark.parametrize("module", sorted(m for m in MODULES if row(m)[1].split(".")[0] in WITHOUT_TENSORFLOW))
def test_the_ground_floor_imports_no_tensorflow(module):
    loaded, pending = set(), {module}
    while pending:  # at once or through others
        name = pending.pop()
        loaded.add(name)
        if name in MODULES:
            parents = {name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)}
            pending |= (imported(name, at_import_only=True) | parents) - loaded
    assert not {name.split(".")[0] for name in loaded} & TENSORFLOW


@pytest.mark.parametrize(
    ("source", "always", "at_import"),
    [
        ("import a.b, c", {"a.b", "c"}, {"a.b", "c"}),
        ("from tfdist import config\nfrom a import b", {"tfdist.config", "a"}, {"tfdist.config", "a"}),
        ("def f():\n    import a", {"a"}, set()),
        ("class C:\n    import a\n    def f(self):\n        import b", {"a", "b"}, {"a"}),
        ("try:\n    import a\nexcept ImportError:\n    import b", {"a", "b"}, {"a", "b"}),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", {"b"}, {"b"}),
    ],
)
def test_the_search_for_imports_finds_them(source, always, at_import):
    assert set(imports(ast.parse(source), False)) == always
    assert set(imports(ast.parse(source), True)) == at_import


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns a function that runs Python where loading TensorFlow or Keras ends the process at once, with code 99."""
    folder = tmp_path_factory.mktemp("poison")
    for name in TENSORFLOW:
        (folder / f"{name}.py").write_text("import os\nos._exit(99)\n")
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environ["PYTHONPATH"] = str(folder)

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**environ, **more},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.mark.parametrize(
    "code", ["import tensorflow", "import keras", "import tfdist.data", "import tfdist; tfdist.Trainer"]
)
def test_loading_tensorflow_would_be_noticed(run, code):
    assert run("-c", code).returncode == 99


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (
            [
                "-c",
                "import tfdist; tfdist.TrainConfig(), tfdist.ClusterSpec, tfdist.ConfigError, tfdist.Task, dir(tfdist)",
            ],
            0,
        ),
        (["-c", "import tfdist.commands.train, tfdist.tasks.digits, tfdist.tasks.synthetic"], 0),
        (["-m", "tfdist.train", "--help"], 0),
        (["-m", "tfdist.train"], 2),
        (["-m", "tfdist", "train", "--config=digits_topk", "--config.compression.name=topq", "--workdir=unused"], 2),
        (["-m", "tfdist.train", "--config=configs/digits.py", "--config.epochs=0", "--workdir=unused"], 2),
        (["-m", "tfdist.train", "--config=configs/digits.py", "--config.epoch=1", "--workdir=unused"], 2),
        (["-m", "tfdist.train", "--config=configs/digits.py", "--config.epochs=x", "--workdir=unused"], 2),
        (["-m", "tfdist.train", "--config=configs/digits.py", "--config.strategy.name=miror", "--workdir=unused"], 2),
        (["-m", "tfdist.train", "--config=configs/digits.py", "--config.task=digts", "--workdir=unused"], 2),
        (["-m", "tfdist.train", "--config=digits_topk", "--config.compression.samples=0", "--workdir=unused"], 2),
        (["-m", "tfdist.train", "--config=digits_topk", "--config.compression.options.samples=0"], 2),
        (["-m", "tfdist.train", "--config=configs/digits_mirrored.py", "--config.strategy.devices=3"], 2),
        (["-m", "tfdist.train", "--config=configs/no_such_file.py", "--workdir=unused"], 2),
        (["-m", "tfdist.train", "--config=README.md", "--workdir=unused"], 2),
        (["-m", "tfdist.cluster", "show"], 0),
        (["-m", "tfdist.cluster", "check"], 0),
        (["-m", "tfdist.doctor", "devices"], 2),
        *(([*TFDIST, *words, "--help"], 0) for words in ([], *WORDS)),
        *(([*TFDIST, *words, "--version"], 0) for words in ([], *([words[0]] for words in WORDS[:3]))),
        *(([*TFDIST, *words, "--hlep"], 2) for words in ([], *WORDS)),
        (["-m", "tfdist"], 2),
        (["-m", "tfdist", "trian"], 2),
        (["-m", "tfdist", "train", "--config=digits", "--wrokdir=unused"], 2),
        (["-m", "tfdist", "cluster", "show", "--fromat=json"], 2),
        (["-m", "tfdist", "backup", "show", "no_such_folder"], 2),
        (["-m", "tfdist", "backup", "show", "docs"], 1),
        (["-m", "tfdist", "backup", "export", "docs", "unused.keras"], 2),
        (["-m", "tfdist.backup", "exprot"], 2),
        (["-m", "tfdist.launch"], 2),
    ],
)
def test_what_needs_no_tensorflow_loads_none(run, arguments, exit_code):
    done = run(*arguments)
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert not exit_code or len(done.stderr.splitlines()) == 1


def test_every_command_is_asked_for_its_help_and_a_wrong_flag():
    assert {words[0] for words in WORDS} == __main__.COMMANDS.keys()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("tfdist.cluster check", ["TF_CONFIG: 'cluster' must be an object", "TF_CONFIG: 'task' is missing"]),
        (
            # How many workers there are is not known: the batch is not judged.
            "tfdist.train --config=configs/digits_multi_worker.py --config.global_batch_size=63 --workdir=unused",
            ["tfdist: TF_CONFIG: 'cluster' must be an object", "tfdist: TF_CONFIG: 'task' is missing"],
        ),
        (
            "tfdist.train --config=configs/digits.py --config.epoch=1 --config.seed=-1 --workdir=unused",
            [
                "tfdist: TF_CONFIG: 'cluster' must be an object",
                "tfdist: TF_CONFIG: 'task' is missing",
                "tfdist: --config.epoch: unknown config field 'epoch'; did you mean 'epochs'?",
                "tfdist: seed must be 0 to",
            ],
        ),
    ],
)
def test_every_fault_of_tf_config_and_configuration_is_found_before_tensorflow_is_loaded(run, command, expected):
    done = run("-m", *command.split(), TF_CONFIG='{"cluster": 3}')
    assert (done.returncode, done.stdout) == (2, "")
    found = done.stderr.splitlines()
    assert [fault.startswith(said) for fault, said in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize(("workers", "batch", "exit_code"), [(3, 64, 2), (3, 63, 99), (2, 63, 2)])
def test_a_batch_that_the_workers_of_tf_config_do_not_divide_is_found_before_tensorflow_is_loaded(
    run, workers, batch, exit_code
):
    cluster = {"cluster": {"worker": [f"h{i}:1" for i in range(workers)]}, "task": {"type": "worker", "index": 0}}
    arguments = ["--config=configs/digits_multi_worker.py", f"--config.global_batch_size={batch}", "--workdir=unused"]
    done = run("-m", "tfdist.train", *arguments, TF_CONFIG=json.dumps(cluster))
    assert done.returncode == exit_code
    said = f"tfdist: global_batch_size {batch} is not divisible by {workers} replicas"
    assert done.stderr.startswith(said) is (exit_code == 2)


def test_the_supervisor_of_a_training_loads_no_tensorflow_but_its_tasks_do(run, tmp_path):
    done = run("-m", "tfdist.train", "--config=configs/digits_multi_worker.py", f"--workdir={tmp_path}")
    assert done.returncode == 99
    assert "failed with exit code 99; ending all tasks" in done.stdout
