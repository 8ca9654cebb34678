"""`flags.parse`: the command line of `tfdist.train`, its defaults, overrides and faults."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist import flags
from tfdist.config import TrainConfig
from tfdist.errors import ConfigError

FILE = """
import tfdist

def get_config():
    return tfdist.TrainConfig(global_batch_size=32)
"""


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes `run.py` and returns the flag for it."""

    def write(text=FILE, name="run.py"):
        (tmp_path / name).write_text(text)
        return f"--config={tmp_path / name}"

    return write


def parse(*arguments):
    return flags.parse(["train", *arguments], "what it does")


def faults(*arguments):
    with pytest.raises(ConfigError) as raised:
        parse(*arguments)
    return raised.value.faults


def test_without_overrides_the_file_decides(write):
    config, workdir = parse(write())
    assert config == TrainConfig(global_batch_size=32)
    assert workdir == pathlib.Path("runs/run")


def test_workdir_may_be_set(write):
    assert parse(write(), "--workdir=here/there")[1] == pathlib.Path("here/there")


def test_config_and_its_file_may_be_two_arguments(write):
    flag, _, path = write().partition("=")
    config, workdir = parse(flag, path, "--config.epochs", "3", "-config.seed=4")
    assert (config.epochs, config.seed, workdir) == (3, 4, pathlib.Path("runs/run"))


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        (["--config.epochs=3"], "epochs", 3),
        (["--config.epochs=3", "--config.epochs=4"], "epochs", 4),
        (["--config.learning_rate=1e-2"], "learning_rate", 0.01),
        (["--config.learning_rate=1"], "learning_rate", 1.0),
        (["--config.deterministic"], "deterministic", True),
        (["--config.deterministic=true"], "deterministic", True),
        (["--config.deterministic", "--noconfig.deterministic"], "deterministic", False),
        (["--config.strategy.name=mirrored"], "strategy.name", "mirrored"),
        (["--config.strategy.devices=CPU:0"], "strategy.devices", "CPU:0"),
        (["--config.strategy.devices=1"], "strategy.devices", "1"),
        (["--config.optimizer.nesterov=1", "--config.optimizer.name=sgd"], "optimizer.nesterov", True),
        (["--config.task_options.dropout=0.5"], "task_options.dropout", 0.5),
        (["--config.task_options.filters=4"], "task_options.filters", 4),
    ],
)
def test_a_field_is_set(write, arguments, path, value):
    found, _ = parse(write(), *arguments)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_overrides_of_one_run_do_not_reach_the_next(write):
    parse(write(), "--config.task_options.filters=4", "--config.optimizer.epsilon=0.1")
    assert parse(write())[0] == TrainConfig(global_batch_size=32)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--config.epoch=3", "--config.epoch: unknown config field 'epoch'; did you mean 'epochs'? Known: task,"),
        ("--config.optimizer.momentun=3", "unknown config field 'momentun'; did you mean 'momentum'? Known: name,"),
        ("--config.optimiser.momentum=3", "unknown config field 'optimiser'; did you mean 'optimizer'?"),
        ("--config.epochs.x=3", "unknown config field 'x'. It has no fields."),
        ("--config.=3", "unknown config field ''"),
        ("--noconfig.bogus", "--noconfig.bogus: unknown config field 'bogus'"),
        ("--noconfig.epochs", "--noconfig.epochs: only a field that is true or false is turned off"),
        ("--noconfig.deterministic=1", "without a value"),
        ("--config.optimizer=sgd", "this is a group of fields; set one of them, such as --config.optimizer.name=..."),
        (
            "--config.task_options=x",
            "this is a group of fields; set one of them, such as --config.task_options.filters",
        ),
        ("--config.epochs=many", "--config.epochs: expected a whole number. Received: 'many'."),
        ("--config.epochs=", "--config.epochs: expected a whole number. Received: ''."),
        ("--config.epochs=1.5", "expected a whole number. Received: '1.5'."),
        ("--config.learning_rate=fast", "--config.learning_rate: expected a number. Received: 'fast'."),
        ("--config.deterministic=maybe", "--config.deterministic: expected true or false. Received: 'maybe'."),
        ("--config.epochs=0", "epochs must be 1 or more, and finite. Received: 0."),
        ("--config.task=synthetic", "set task and task_options together, in the config file."),
        ("--config.epochs", "Missing value for flag --config.epochs"),
        ("--bogus=1", "Unknown command line flag 'bogus'"),
        ("epochs=3", "Arguments that are no flags: epochs=3. Fields are set as --config.field=value."),
    ],
)
def test_a_faulty_argument_is_named(write, argument, said):
    found = faults(write(), argument)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
@pytest.mark.parametrize(("kind", "settable"), [("int | None", True), ("tuple[int, ...]", True), ("list[int]", False)])
def test_a_field_of_a_type_that_flags_cannot_set_is_a_fault(write, future, kind, settable):
    text = f"{future}import dataclasses\n@dataclasses.dataclass\nclass Options:\n    size: {kind} = None\n{FILE}"
    flag = write(text.replace("global_batch_size=32", "global_batch_size=32, task_options=Options()"))
    said = faults(flag, "--config.task_options.size=1")[0]
    assert ("--config.task_options.size: a list[int] cannot be set" in said) is not settable
    assert ("takes task_options of tfdist.tasks.digits.Options" in said) is settable


def test_every_fault_is_reported_at_once(write):
    arguments = ["--config.epoch=3", "--config.seed=x", "--config.strategy=mirrored", "--noconfig.x"]
    assert len(faults(write(), *arguments)) == 4
    assert len(faults(write(), "--config.epochs=0", "--config.seed=-1", "--config.precision=half")) == 3


def test_a_field_set_before_the_file_is_a_fault(write):
    assert "before a value for --config" in faults("--config.epochs=3", write())[0]


@pytest.mark.parametrize("arguments", [[], ["--config"], ["--config="], ["--config.epochs=3"]])
def test_a_missing_config_flag_is_a_fault(arguments):
    assert faults(*arguments)[0].startswith("--config is missing")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def get_config(:\n  pass\n", ", line 1: SyntaxError: invalid syntax"),
        ("x = 1\ny = z\n", ", line 2: NameError: name 'z' is not defined"),
        ("def get_config():\n    x = 1\n    return x / 0\n", ", line 3: ZeroDivisionError: division by zero"),
        (
            "import json\n\n\ndef get_config():\n    return json.loads('x')\n",
            ", line 5: JSONDecodeError: Expecting value",
        ),
        ("def f():\n    1 / 0\n\ndef get_config():\n    f()\n", ", line 2: ZeroDivisionError: division by zero"),
        ("def get_config():\n    open('/no/such/file')\n", ", line 2: FileNotFoundError: "),
        ("def get_config():\n    return {}['x']\n", ", line 2: KeyError: 'x'"),
        ("def config():\n    pass\n", ": the file defines no function get_config()."),
        ("def get_config():\n    pass\n", ": get_config() must return a tfdist.TrainConfig. Received: NoneType."),
        ("def get_config():\n    return {}\n", ": get_config() must return a tfdist.TrainConfig. Received: dict."),
    ],
)
def test_a_broken_file_is_told_by_its_own_line(write, text, said):
    flag = write(text)
    found = faults(flag)
    assert len(found) == 1
    assert found[0].startswith(flag + said)
    assert "Traceback" not in found[0]


def test_a_file_that_is_missing_or_no_text_is_a_fault(tmp_path):
    assert faults(f"--config={tmp_path}/none.py") == (f"--config={tmp_path}/none.py: No such file or directory.",)
    assert faults(f"--config={tmp_path}") == (f"--config={tmp_path}: Is a directory.",)
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\x00")
    assert "can't decode" in faults(f"--config={tmp_path}/bytes.py")[0]
    assert len(faults("--config=nul\0.py")) == 1


def test_faults_that_the_file_reports_are_kept(write):
    text = "from tfdist import ConfigError\ndef get_config():\n    raise ConfigError(['one', 'two'])\n"
    assert faults(write(text)) == ("one", "two")


def test_the_file_runs_once(write, capsys):
    parse(write(f"print('run')\n{FILE}"), "--config.epochs=2")
    assert capsys.readouterr().out == "run\n"


def test_the_files_annotations_are_not_made_texts(write, capsys):
    parse(write(f"def f(x: int): pass\nprint(f.__annotations__['x'] is int)\n{FILE}"))
    assert capsys.readouterr().out == "True\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_prints_every_field_and_gives_nothing(capsys, flag):
    assert parse("--config=no/such/file.py", flag) is None
    shown = capsys.readouterr().out
    assert shown.startswith("what it does\n")
    assert "--workdir" in shown and "--config:" in shown
    for path in PATHS:
        assert f"  --{path}=" in shown


def paths(config, prefix):
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from paths(value, f"{prefix}.{field.name}")
        else:
            yield f"{prefix}.{field.name}"


PATHS = list(paths(TrainConfig(), "config"))
names = st.one_of(
    st.sampled_from(PATHS),
    st.tuples(st.sampled_from(PATHS), st.sampled_from(["x", ".x", "[0]", ".", " "])).map("".join),
    st.text(max_size=8).map(lambda text: "config." + text),
    st.sampled_from(["config", "config.", "config.optimizer", "workdir", "flagfile", "undefok"]),
)
values = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["", "true", "none", "build", "mirrored", "json:dumps", ".:", "2"]),
    st.text(max_size=8),
)
arguments = st.one_of(
    st.tuples(st.sampled_from(["-", "--", "--no", "---", ""]), names, st.just("="), values).map("".join),
    st.tuples(st.sampled_from(["--", "--no"]), names).map("".join),
    values,
)


@given(st.lists(arguments, max_size=3))
def test_any_arguments_give_a_config_or_a_config_error(tmp_path_factory, arguments):
    path = tmp_path_factory.getbasetemp() / "any.py"
    path.write_text(FILE)
    try:
        found = parse(f"--config={path}", *arguments)
    except ConfigError as e:
        assert e.faults and all(e.faults)
    else:
        assert found is None or (isinstance(found[0], TrainConfig) and isinstance(found[1], pathlib.Path))
