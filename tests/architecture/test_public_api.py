"""The public names: those of `tfdist` and of the faces of its packages; private names stay at home."""

from __future__ import annotations

import ast
import importlib

import pytest

from tests.architecture.sources import MODULES, tree

PUBLIC = {
    "tfdist": [
        "BackupAndRestore",
        "BackupError",
        "ClusterError",
        "ClusterSpec",
        "CompressionConfig",
        "ConfigError",
        "DataError",
        "Feature",
        "Outer",
        "StrategyConfig",
        "Task",
        "TaskSpec",
        "TrainConfig",
        "Trainer",
        "create_strategy",
        "distribute_optimizer",
        "find_cluster",
        "run",
        "slow",
        "total",
        "whole_batch",
    ],
    "tfdist.cluster": ["ClusterSpec", "TaskSpec", "free_ports", "from_tf_config", "local_cluster"],
    "tfdist.compression": [
        "BF16",
        "FP16",
        "Compressor",
        "ErrorFeedback",
        "Int8",
        "NoCompression",
        "PerVariable",
        "PowerSGD",
        "TopK",
        "Warmup",
        "create",
        "option",
    ],
    "tfdist.config": [
        "COMPRESSORS",
        "STRATEGIES",
        "BackupConfig",
        "ClusterConfig",
        "CompressionConfig",
        "MonitoringConfig",
        "OptimizerConfig",
        "Outer",
        "ScheduleConfig",
        "StrategyConfig",
        "StrategyTraits",
        "TrainConfig",
    ],
    "tfdist.data": [
        "arrays_from",
        "epochs",
        "from_generator",
        "from_pydataset",
        "own_rows",
        "records_from",
        "rows_from",
    ],
    "tfdist.launch": ["Launcher", "Options"],
    "tfdist.layers": ["Embedding"],
    "tfdist.monitoring": ["Goodput", "TensorBoard", "Throughput", "Tracker", "WireBytes"],
    "tfdist.ray": ["run"],
}
NAMES = [(package, name) for package, names in PUBLIC.items() for name in names]


@pytest.mark.parametrize("package", PUBLIC)
def test_a_face_exports_these_names_and_no_others(package):
    face = importlib.import_module(package)
    assert sorted(face.__all__) == sorted(PUBLIC[package])
    assert set(PUBLIC[package]) <= set(dir(face))


def test_all_packages_that_export_names_are_pinned():
    faces = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert {name for name in faces if hasattr(importlib.import_module(name), "__all__")} == set(PUBLIC)


def test_the_version_is_public():
    assert importlib.import_module("tfdist").__version__


def package_of(module: str) -> str:
    """Returns the package whose private names a module may use: its folder."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def private_names(module: ast.Module) -> set[tuple[str, str]]:
    """Returns the underscore names that a module imports from tfdist, or reads from a module of tfdist, with their modules."""
    found, imported = set(), {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tfdist":
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {(node.module, alias.name) for alias in node.names if is_private(alias.name)}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            read = imported.get(ast.unparse(node.value))
            if read in MODULES:
                found.add((read, node.attr))
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def test_no_module_uses_a_private_name_of_another_package():
    foreign = [
        f"{module} uses {other}.{name}"
        for module, path in MODULES.items()
        for other, name in sorted(private_names(tree(path)))
        if package_of(other) != package_of(module)
    ]
    assert not foreign, "\n".join(foreign)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from tfdist.errors import ConfigError, _one_line as line", {("tfdist.errors", "_one_line")}),
        ("from tfdist import errors\nerrors._one_line('')", {("tfdist.errors", "_one_line")}),
        ("def f():\n    from tfdist import errors as e\n    e._one_line('')", {("tfdist.errors", "_one_line")}),
        ("from tfdist.errors import ConfigError\nConfigError._hidden", set()),
        ("from os import _exit", set()),
    ],
)
def test_the_search_for_private_names_finds_them(source, names):
    assert private_names(ast.parse(source)) == names
