"""Imports point downward only, and the ground floor loads no TensorFlow."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator

import pytest

from tests.architecture.sources import MODULES, ROOT, tree
from tests.helpers import forked_commands
from tfdist import __main__

# From the bottom to the top: a package imports only packages of lower rows. `tfdist` is its face, `__main__` a command.
ROWS = [
    {"aliases", "errors", "version"},
    {"runtime"},
    {"runtime.end"},
    {"runtime.report"},
    {"config.relations", "feature", "runtime.folders", "sharding", "verify.settings"},
    {"cluster", "compat", "config"},
    {"strategy"},
    {"cluster.resolvers", "collectives", "data", "engine", "launch", "replicas"},
    {"cluster.jobs", "compression", "doctor", "layers", "ray", "strategies", "verify"},
    {"backup", "gradients", "tasks"},
    {"monitoring", "step"},
    {"parameter_server", "training"},
    {"commands", "__main__", "train", "tfdist"},
]
# These, with what is in them, import no TensorFlow, or do it inside the functions that need it.
WITHOUT_TENSORFLOW = {
    "aliases",
    "errors",
    "version",
    "runtime",
    "config",
    "cluster",
    "sharding",
    "strategy",
    "engine",
    "feature",
    "doctor",
    "launch",
    "ray",
    "tasks",
    "verify",
    "commands",
    "train",
    "__main__",
    "tfdist",
}

TFDIST = ["-m", "tfdist"]
# Each command with what it needs before its flags, none of which starts anything.
WORDS = [
    ["train", "--config=digits"],
    ["launch"],
    ["verify"],
    ["cluster", "show"],
    ["cluster", "check"],
    ["cluster", "emit", "--target=slurm", "--config=digits", "--workdir=unused"],
    ["backup", "show", "docs"],
    ["backup", "export", "docs", "unused.keras"],
    ["doctor"],
    ["stacks", "unused"],
]


def imports(node: ast.AST, at_import_only: bool) -> Iterator[str]:
    """Yields the modules that a module imports.

    Args:
        node: The module.
        at_import_only: Leaves out imports inside functions, and those under TYPE_CHECKING, which only a type checker sees.
    """
    for child in ast.iter_child_nodes(node):
        if at_import_only and isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
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


@functools.cache
def imported(module: str, at_import_only: bool = False) -> frozenset[str]:
    return frozenset(imports(tree(MODULES[module]), at_import_only))


def row(module: str) -> tuple[int, str]:
    """Returns the row of a module's package, and the package."""
    name = module.removeprefix("tfdist.")
    while name:
        for number, packages in enumerate(ROWS):
            if name in packages:
                return number, name
        name = name.rpartition(".")[0]
    raise AssertionError(f"give the package of {module} its place in ROWS")


def test_imports_point_downward():
    upward = []
    for module in MODULES:
        importer_row, importer_package = row(module)
        for name in sorted(imported(module)):
            if name.split(".")[0] == "tfdist":
                imported_row, imported_package = row(name)
                if imported_package != importer_package and imported_row >= importer_row:
                    upward.append(f"{module} (row {importer_row + 1}) imports {name} (row {imported_row + 1})")
    assert not upward, "\n".join(upward)


def test_every_package_stands_in_the_table_of_rows():
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("| row |")[2]
    packages = {row(module)[1] for module in MODULES} - {"tfdist", "train"}
    assert not [package for package in sorted(packages) if f"`{package.replace('.', '/')}" not in table]


def test_no_modules_import_each_other_in_a_circle():
    pending = {module: imported(module) & MODULES.keys() - {module} for module in MODULES}
    while free := {module for module, others in pending.items() if not others & pending.keys()}:
        pending = {module: others for module, others in pending.items() if module not in free}
    assert not pending


def test_the_ground_floor_imports_no_tensorflow():
    ground_floor = [module for module in MODULES if row(module)[1].split(".")[0] in WITHOUT_TENSORFLOW]
    assert len(ground_floor) > 50
    found = {module: names for module in ground_floor if (names := loaded_with(module) & forked_commands.TENSORFLOW)}
    assert not found


def loaded_with(module: str) -> set[str]:
    """Returns the packages that importing a module loads, at once or through other modules of tfdist."""
    loaded, pending = set(), {module}
    while pending:
        name = pending.pop()
        loaded.add(name)
        if name in MODULES:
            parents = {name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)}
            pending |= (imported(name, at_import_only=True) | parents) - loaded
    return {name.split(".")[0] for name in loaded}


def test_tensorflow_is_found_through_other_modules():
    assert "tensorflow" in loaded_with("tfdist.training.trainer")


@pytest.mark.parametrize(
    ("source", "always", "at_import"),
    [
        ("import a.b, c", {"a.b", "c"}, {"a.b", "c"}),
        ("from tfdist import config\nfrom a import b", {"tfdist.config", "a"}, {"tfdist.config", "a"}),
        ("def f():\n    import a", {"a"}, set()),
        ("class C:\n    import a\n    def f(self):\n        import b", {"a", "b"}, {"a"}),
        ("try:\n    import a\nexcept ImportError:\n    import b", {"a", "b"}, {"a", "b"}),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", {"a", "b"}, {"b"}),
    ],
)
def test_the_search_for_imports_finds_them(source, always, at_import):
    assert set(imports(ast.parse(source), False)) == always
    assert set(imports(ast.parse(source), True)) == at_import


@pytest.fixture(scope="module")
def run_all(tmp_path_factory):
    """Returns a function that runs Python programs where loading TensorFlow or Keras ends the process, with code 99."""
    return functools.partial(forked_commands.run_all, folder=ROOT, poison=tmp_path_factory.mktemp("poison"))


def test_loading_tensorflow_would_be_noticed(run_all):
    codes = ["import tensorflow", "import keras", "import tfdist.data", "import tfdist; tfdist.Trainer"]
    assert [done.returncode for done in run_all([(["-c", code], {}) for code in codes])] == [99] * len(codes)


PUBLIC_NAMES = "import tfdist; tfdist.TrainConfig(), tfdist.ClusterSpec, tfdist.ConfigError, tfdist.Task, dir(tfdist)"
TASKS = "import tfdist.commands.train, tfdist.tasks.digits, tfdist.tasks.ratings, tfdist.tasks.synthetic"
EXIT_CODES = [
    (["-c", PUBLIC_NAMES], 0),
    (["-c", TASKS], 0),
    (["-m", "tfdist.train", "--help"], 0),
    (["-m", "tfdist.train"], 2),
    (["-m", "tfdist.train", "--config=configs/digits.py", "--config.epoch=1", "--workdir=unused"], 2),
    (["-m", "tfdist.train", "--config=digits_topk", "--config.compression.name=topq"], 2),
    (["-m", "tfdist.train", "--config=README.md", "--workdir=unused"], 2),
    (["-m", "tfdist.cluster", "show"], 0),
    (["-m", "tfdist.cluster", "check"], 0),
    (["-m", "tfdist.doctor", "devices"], 2),
    *(([*TFDIST, *words, "--help"], 0) for words in ([], *WORDS)),
    ([*TFDIST, "--version"], 0),
    (["-m", "tfdist", "train", "--config=digits", "--wrokdir=unused"], 2),
    (["-m", "tfdist", "backup", "show", "no_such_folder"], 2),
    (["-m", "tfdist", "backup", "show", "docs"], 1),
    (["-m", "tfdist", "backup", "export", "docs", "unused.keras"], 2),
]


def test_what_needs_no_tensorflow_loads_none(run_all):
    wrong = []
    commands = [(arguments, {}) for arguments, _ in EXIT_CODES]
    for (arguments, exit_code), done in zip(EXIT_CODES, run_all(commands), strict=True):
        lines = done.stderr.splitlines()
        if done.returncode != exit_code or "Traceback" in done.stderr or (exit_code and len(lines) != 1):
            wrong.append(f"{' '.join(arguments)}: {done.returncode} in place of {exit_code}: {done.stderr}")
    assert not wrong, "\n".join(wrong)


FAULTS = {
    "tfdist.cluster check": ["TF_CONFIG: 'cluster' must be an object", "TF_CONFIG: 'task' is missing"],
    # The number of workers is unknown: the batch is not checked.
    "tfdist.train --config=configs/digits_multi_worker.py --config.global_batch_size=63 --workdir=unused": [
        "tfdist: TF_CONFIG: 'cluster' must be an object",
        "tfdist: TF_CONFIG: 'task' is missing",
    ],
    "tfdist.train --config=configs/digits.py --config.epoch=1 --config.seed=-1 --workdir=unused": [
        "tfdist: TF_CONFIG: 'cluster' must be an object",
        "tfdist: TF_CONFIG: 'task' is missing",
        "tfdist: --config.epoch: unknown config field 'epoch'; did you mean 'epochs'?",
        "tfdist: seed must be 0 to",
    ],
}


def test_every_fault_of_tf_config_and_configuration_is_found_before_tensorflow_is_loaded(run_all):
    commands = [(["-m", *command.split()], {"TF_CONFIG": '{"cluster": 3}'}) for command in FAULTS]
    for done, expected in zip(run_all(commands), FAULTS.values(), strict=True):
        assert (done.returncode, done.stdout) == (2, "")
        lines = done.stderr.splitlines()
        assert [line.startswith(said) for line, said in zip(lines, expected, strict=True)] == [True] * len(expected)


def test_a_batch_that_the_workers_of_tf_config_do_not_divide_is_found_before_tensorflow_is_loaded(run_all, tmp_path):
    cases = [(3, 64, 2), (3, 63, 99), (2, 63, 2)]  # workers, batch, exit code
    commands = []
    for workers, batch, _ in cases:
        cluster = {"cluster": {"worker": [f"h{i}:1" for i in range(workers)]}, "task": {"type": "worker", "index": 0}}
        arguments = [
            "--config=configs/digits_multi_worker.py",
            f"--config.global_batch_size={batch}",
            f"--workdir={tmp_path}",
        ]
        commands.append((["-m", "tfdist.train", *arguments], {"TF_CONFIG": json.dumps(cluster)}))
    for (workers, batch, exit_code), done in zip(cases, run_all(commands), strict=True):
        assert done.returncode == exit_code
        said = f"tfdist: global_batch_size {batch} is not divisible by {workers} replicas"
        assert done.stderr.startswith(said) is (exit_code == 2)


def test_the_supervisor_of_a_training_loads_no_tensorflow_but_its_tasks_do(run_all, tmp_path):
    arguments = ["-m", "tfdist.train", "--config=configs/digits_multi_worker.py", f"--workdir={tmp_path}"]
    [done] = run_all([(arguments, {})])
    assert done.returncode == 99
    assert "failed with exit code 99" in done.stdout


def test_every_command_is_asked_for_its_help():
    assert {words[0] for words in WORDS} == __main__.COMMANDS.keys()
