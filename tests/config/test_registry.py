"""Names to objects: those of tables, of the user's own modules, and of installed distributions (metadata as pip writes it)."""

from __future__ import annotations

import collections
import pathlib
import sys

import pytest

from tfdist.cluster.resolvers import discovery
from tfdist.config import COMPRESSORS, CompressionConfig, files, registry, validation
from tfdist.config import train as config_lib
from tfdist.errors import ConfigError
from tfdist.tasks.base import Task

TABLE = {"counter": "collections:Counter", "broken": "tfdist.no_such_module:Thing"}


def fault_of(name):
    with pytest.raises(ConfigError) as raised:
        registry.resolve("thing", name, TABLE)
    return str(raised.value)


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_a_short_name_and_a_full_name_resolve():
    assert registry.resolve("thing", "counter", TABLE) is collections.Counter
    assert registry.resolve("thing", "collections:OrderedDict", TABLE) is collections.OrderedDict


def test_the_users_own_module_resolves(module):
    name = module("own_module_a", "class Mine: pass")
    assert registry.resolve("thing", f"{name}:Mine", {}).__name__ == "Mine"


def test_every_task_of_the_table_is_a_task_with_sound_options():
    for name in registry.TASKS:
        task = registry.resolve("task", name, registry.TASKS)
        assert issubclass(task, Task)
        assert list(validation.group_faults(task.Options(), "task_options")) == []


def test_an_unknown_short_name_names_the_nearest_and_all():
    said = fault_of("conter")
    assert "Unknown thing 'conter'; did you mean 'counter'?" in said
    assert "one of broken, counter, or your own as 'package.module:Name'" in said


@pytest.mark.parametrize("name", ["", ":", "a:", ":b", ".a:b", "a..b:c", "a b:c", "a\0b:c", "a:b:c", "collections:a.b"])
def test_what_is_no_name_is_a_fault(name):
    assert fault_of(name).startswith(f"Unknown thing {name!r}")


def test_a_missing_module_or_package_is_a_fault():
    assert "The module of thing 'no_such_package.a:B' cannot be found" in fault_of("no_such_package.a:B")
    assert "PYTHONPATH" in fault_of("collections.no_such_module:B")
    assert "cannot be found" in fault_of("broken")


def test_a_missing_attribute_names_the_nearest():
    assert "Module 'collections' has no 'Countr'; did you mean 'Counter'?" in fault_of("collections:Countr")


@pytest.mark.parametrize(
    ("text", "error"),
    [("import no_such_module_inside", ModuleNotFoundError), ("1 / 0", ZeroDivisionError), ("x.y = 1", NameError)],
)
def test_an_error_inside_the_users_module_is_told_with_its_place(module, text, error):
    name = module(f"own_module_{error.__name__}", text)
    said = rf"The module of thing '{name}:Mine' cannot be imported: {error.__name__}: .*{name}\.py:1\)"
    with pytest.raises(ConfigError, match=said) as raised:
        registry.resolve("thing", f"{name}:Mine", TABLE)
    assert isinstance(raised.value.__cause__, error)


def test_the_file_that_is_to_be_copied_is_the_preset():
    configs = pathlib.Path(__file__).parents[2] / "configs"
    assert files.load(str(configs / "digits_multi_worker.py")) == files.load("digits_multi_worker")


TASK = "import dataclasses, tfdist\n@dataclasses.dataclass\nclass Options:\n    size: int = 3\nclass Own(tfdist.Task):\n    Options = Options\n"
RESOLVER = (
    "from tfdist.cluster.resolvers.environment import RankAddresses\nfrom tfdist.cluster import ClusterSpec, TaskSpec\n"
)
RANKS = "def resolve(variables):\n    return RankAddresses(variables.get('OWN_HOSTS').split(','), 1)\n"
HOSTS = {"OWN_HOSTS": "a:1,b:1"}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that installs a distribution: its entry points by group and name, and the text of its module, if any."""

    def install(name: str, entry_points: dict[str, dict[str, str]], module: str | None = None) -> str:
        site, package = tmp_path / name, f"installed_{name.replace('-', '_')}"
        described = site / f"{name.replace('-', '_')}-1.0.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [
            line
            for group, entries in entry_points.items()
            for line in (f"[{group}]", *(f"{n} = {target}" for n, target in entries.items()))
        ]
        (described / "entry_points.txt").write_text("\n".join(lines).replace("MODULE", package) + "\n")
        if module is not None:
            (site / f"{package}.py").write_text(module)
        monkeypatch.syspath_prepend(site)
        modules.append(package)
        return package

    modules: list[str] = []
    yield install
    for package in modules:
        sys.modules.pop(package, None)


def fault(ask, *arguments, **named):
    with pytest.raises(ConfigError) as raised:
        ask(*arguments, **named)
    (sentence,) = raised.value.faults
    return sentence


def test_a_task_is_found_with_its_options(install):
    package = install("own-task", {"tfdist.tasks": {"own": "MODULE:Own"}}, TASK)
    assert registry.resolve("task", "own", registry.TASKS).__module__ == package
    config = config_lib.TrainConfig()
    config.choose_task("own")
    assert config.task_options.size == 3


def test_a_compressor_is_found_with_its_options(install):
    module = "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Own:\n    factor: float = 1.0\n    def exchange(self): ...\n"
    install("own-compressor", {"tfdist.compressors": {"own": "MODULE:Own"}}, module)
    assert list(CompressionConfig("own").option_fields()) == ["use_error_feedback", "warmup_steps", "factor"]
    assert list(CompressionConfig("own", factor=2.0).faults()) == []
    (said,) = validation.group_faults(CompressionConfig("own", factr=2.0), "compression")
    assert "compression 'own' takes no 'factr'; did you mean 'factor'?" in said


def test_the_nearest_name_is_a_built_in_or_an_installed_one(install):
    install("own-names", {"tfdist.compressors": {"sketch": "MODULE:Own"}, "tfdist.tasks": {"spirals": "MODULE:Own"}})
    assert (
        "Unknown compression 'sketc'; did you mean 'sketch'? Expected one of bf16, fp16, int8, none, powersgd, sketch"
        in (fault(CompressionConfig("sketc").compressor_class))
    )
    assert "did you mean 'topk'?" in fault(CompressionConfig("topkk").compressor_class)
    assert "one of digits, ratings, spirals, synthetic, or" in fault(registry.resolve, "task", "x", registry.TASKS)


def test_a_built_in_name_is_not_replaced_and_a_full_name_not_looked_up(install, monkeypatch):
    package = install("own-topk", {"tfdist.compressors": {"topk": "MODULE:Own"}}, "raise SystemExit")
    assert CompressionConfig("topk").compressor_class().__module__ == "tfdist.compression.topk"
    assert not registry.find_plugins("compression", COMPRESSORS)
    monkeypatch.setattr(registry, "find_plugins", None)
    assert registry.resolve("task", "digits", registry.TASKS) and package not in sys.modules
    assert registry.resolve("task", "tfdist.tasks.digits:Digits", registry.TASKS)


@pytest.mark.parametrize(
    ("target", "module", "said"),
    [
        (
            "MODULE:Own",
            None,
            "The module of task 'own' of distribution own-broken 1.0 cannot be found: No module named",
        ),
        (
            "MODULE:Own",
            "import not_there",
            "of task 'own' of distribution own-broken 1.0 cannot be imported: ModuleNotFo",
        ),
        ("MODULE:Own", "raise SystemExit(3)", "cannot be imported: SystemExit: 3 ("),
        ("MODULE:Own", "Own_ = 1", "has no 'Own'; did you mean 'Own_'? (task 'own' of distribution own-broken 1.0)"),
        ("MODULE", "", "must be 'package.module:Name'. Received: 'installed_own_broken'."),
        ("MODULE:A.b", "", "The entry point of task 'own' of distribution own-broken 1.0 must be"),
        ("not a module", "", "must be 'package.module:Name'. Received: 'not a module'."),
    ],
)
def test_an_entry_point_that_cannot_be_imported_names_its_distribution(install, target, module, said):
    install("own-broken", {"tfdist.tasks": {"own": target}}, module)
    assert said in fault(registry.resolve, "task", "own", registry.TASKS)


def test_damaged_metadata_hide_no_other_plugin(install, capfd):
    install("own-damaged", {"other.group": {"": "x"}}, "")
    site = next(path for path in map(pathlib.Path, sys.path) if path.name == "own-damaged")
    (site / "own_damaged-1.0.dist-info/entry_points.txt").write_text("[other.group]\nno equals sign\n")
    install("own-sound", {"tfdist.tasks": {"own": "MODULE:Own"}}, TASK)
    for _ in range(2):
        assert registry.resolve("task", "own", registry.TASKS)
    assert (
        capfd.readouterr().out.count("the entry points of distribution own-damaged 1.0 cannot be read: TypeError") == 1
    )


def test_one_name_of_two_distributions_is_a_fault_once_it_is_used(install):
    install("own-first", {"tfdist.tasks": {"own": "MODULE:Own"}}, TASK)
    install("own-second", {"tfdist.tasks": {"own": "MODULE:Own", "other": "MODULE:Own"}}, TASK)
    said = fault(registry.resolve, "task", "own", registry.TASKS)
    assert "is an entry point of several distributions" in said and "own-first 1.0" in said and "own-second 1.0" in said
    assert registry.resolve("task", "other", registry.TASKS)


def test_a_resolver_is_asked_where_its_variable_is_set(install):
    resolvers = {"own.OWN_HOSTS": "MODULE:resolve", "idle.IDLE_HOSTS": "not_there:resolve", "named": "MODULE:resolve"}
    package = install("own-resolver", {"tfdist.resolvers": resolvers}, RESOLVER + RANKS)
    assert discovery.resolve({}) is None and package not in sys.modules
    assert discovery.signals()[-2:] == ["IDLE_HOSTS", "OWN_HOSTS"]
    for source in ("auto", "own"):
        found = discovery.resolve(HOSTS, source)
        assert (found.source, found.task.index, found.cluster.jobs) == ("own", 1, {"worker": ("a:1", "b:1")})
    assert discovery.resolve(HOSTS, "named").source == "named"
    assert discovery.resolve(HOSTS, "none") is None
    assert (
        discovery.resolve(
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}', **HOSTS}
        ).source
        == "tf_config"
    )
    said = fault(discovery.resolve, {}, "own")
    assert said == "the environment describes no cluster of own: OWN_HOSTS is not set."
    assert "unknown cluster source 'ownn'; did you mean 'own'?" in fault(discovery.resolve, {}, "ownn")
    assert fault(discovery.resolve, {"IDLE_HOSTS": "a"}).startswith(
        "idle: The module of cluster source 'idle' of distribution own-resolver 1.0 cannot be found"
    )


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        ("1 / 0", "own: the resolver of distribution own-odd 1.0 raises ZeroDivisionError: division by zero."),
        ("'a:1'", "own: the resolver of distribution own-odd 1.0 must return RankAddresses, a pair of"),
        ("('a:1', 1)", "or None. Received: ('a:1', 1)."),
    ],
)
def test_a_resolver_that_returns_something_else_is_a_fault(install, returns, said):
    module = f"{RESOLVER}def resolve(variables):\n    return {returns}\n"
    install("own-odd", {"tfdist.resolvers": {"own.OWN_HOSTS": "MODULE:resolve"}}, module)
    assert said in fault(discovery.resolve, HOSTS)


def test_a_resolver_may_return_a_pair_or_nothing(install):
    pair = "def pair(v):\n    return ClusterSpec({'worker': ['a:1', 'b:1']}), TaskSpec('worker', 0)\n"
    nothing = "def nothing(v):\n    return None\n"
    resolvers = {"pair.PAIR": "MODULE:pair", "nothing.NOTHING": "MODULE:nothing"}
    install("own-pair", {"tfdist.resolvers": resolvers}, RESOLVER + pair + nothing)
    assert discovery.resolve({"NOTHING": "1"}) is None
    assert discovery.resolve({"PAIR": "1", "NOTHING": "1"}).source == "pair"
