"""`flags.parse`: the command line of `tfdist.train`, its defaults, overrides and faults."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.config import TrainConfig, flags, train, validation
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
    parse("--config=digits_topk", "--config.task_options.filters=4", "--config.optimizer.momentum=0.1")
    assert parse("--config=digits_topk")[0].optimizer.momentum == 0.9
    parse(write(), "--config.task_options.filters=4", "--config.optimizer.epsilon=0.1")
    assert parse(write())[0] == TrainConfig(global_batch_size=32)


def test_an_optimizers_options_are_flags_of_its_types(write):
    options = ["relative_step=false", "clip_threshold=2"]
    flags = [f"--config.optimizer.{option}" for option in options]
    parsed, _ = parse(write(), *flags, "--config.optimizer.name=adafactor")
    assert parsed.optimizer.arguments() == {"relative_step": False, "clip_threshold": 2.0}
    parsed, _ = parse(write(), "--config.optimizer.rho=0.9", "--config.optimizer.name=adadelta")
    assert parsed.optimizer.arguments() == {"rho": 0.9}, "the default of another optimizer"
    layers = ["--config.optimizer.exclude_layers", "dense, out", "--config.optimizer.name=muon"]
    assert parse(write(), *layers)[0].optimizer.exclude_layers == ("dense", "out")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", 0.5),
        ("3", 3),
        ("true", True),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ("word", "word"),
        ("", ""),
        ("(", "("),
    ],
)
def test_an_option_of_ones_own_optimizer_is_a_plain_value(write, text, value):
    parsed, _ = parse(write(), f"--config.optimizer.alpha={text}", "--config.optimizer.name=json:Own")
    assert parsed.optimizer.arguments() == {"alpha": value}


def test_a_name_that_a_flag_sets_leaves_out_the_options_of_the_files_name():
    parsed, _ = parse("--config=digits_topk", "--config.optimizer.name=adam", "--config.compression.name=powersgd")
    assert (parsed.optimizer.arguments(), parsed.compression.to_dict()) == ({}, {"name": "powersgd"})
    parsed, _ = parse("--config=digits_topk", "--config.optimizer.name=rmsprop", "--config.optimizer.rho=0.8")
    assert parsed.optimizer.arguments() == {"momentum": 0.9, "rho": 0.8}, "it takes momentum, too"


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--config.epochs=" + "9" * 5000, "--config.epochs: expected a whole number. Received: '999"),
        ("--config.ep\nochs=1", r"unknown config field 'ep\nochs'; did you mean 'epochs'?"),
        ("--config.\udcff=1", r"--config.\udcff: unknown config field '\udcff'"),
        ("--x\ny", r"unknown flag --x\ny"),
        ("epochs=3", "'epochs=3' is not a flag. Fields are set as --config.field=value."),
        ("", "'' is not a flag."),
        ("-", "'-' is not a flag."),
        ("--flagfile=no/such/file", "--flagfile: "),
    ],
)
def test_an_argument_that_is_no_field_is_named(write, argument, said):
    found = faults(write(), argument)
    assert len(found) == 1
    assert said in found[0]
    assert found[0].isprintable() and len(found[0]) < 500


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config.epochs", "many"], "--config.epochs: expected a whole number. Received: 'many'."),
        (["--config.epochs", "--config.seed=1"], "--config.epochs has no value"),
        (["--config.epoch", "3"], "--config.epoch: unknown config field 'epoch'"),
        (["--config.deterministic", "maybe"], "'maybe' is not a flag."),
        (["--bogus", "3"], "unknown flag --bogus"),
    ],
)
def test_a_value_of_its_own_argument_belongs_to_the_fault(write, arguments, said):
    (found,) = faults(write(), *arguments)
    assert found.startswith(said)


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


def test_faults_of_every_kind_are_reported_at_once(write):
    file = write(FILE.replace("global_batch_size=32", "global_batch_size=32, learning_rate='fast', epochs=0"))
    arguments = ["--config.epoch=3", "--config.seed=x", "--bogus", "word", "--config.precision=half", "--", "word"]
    found = faults(file, *arguments)
    expected = [
        "'epoch'",
        "whole number",
        "unknown flag",
        "'word' is no",
        "epochs must be 1",
        "must be float",
        "precision",
    ]
    assert [said in fault for said, fault in zip(expected, found, strict=True)] == [True] * 7


def test_a_field_may_be_set_before_the_file_is_named(write):
    assert parse("--config.epochs=3", "--", write())[0].epochs == 3


def test_a_flag_file_is_read(write, tmp_path):
    (tmp_path / "flags").write_text("--config.epochs=3\n--config.sead=1\n")
    assert "unknown config field 'sead'; did you mean 'seed'?" in faults(write(), f"--flagfile={tmp_path}/flags")[0]
    (tmp_path / "flags").write_text(f"{write()}\n--config.epochs=3\n")
    assert parse(f"--flagfile={tmp_path}/flags")[0].epochs == 3
    (tmp_path / "own").write_text(f"--config.epochs=3\n--flagfile={tmp_path}/own")
    assert list(faults(write(), f"--flagfile={tmp_path}/own")) == [
        f"--flagfile: {tmp_path}/own includes itself; remove that --flagfile from it."
    ]


def test_the_workers_of_the_environment_count(write):
    arguments = [write(), "--config.strategy.name=multi_worker_mirrored", "--config.cluster.workers=3"]
    assert faults(*arguments) == ("global_batch_size 32 is not divisible by 3 replicas; use 30 or 33.",)
    config = flags.read(["train", *arguments], "").config
    validation.check(config, workers=2)
    assert config.cluster.workers == 3


@pytest.mark.parametrize("arguments", [[], ["--config"], ["--config="], ["--config", "--config.epochs=3"]])
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
        ("\n\nimport json.no_such_module\n", ", line 3: ModuleNotFoundError: No module named 'json.no_such_module'"),
        (
            "from tfdist.task import Task\n",
            ", line 1: ModuleNotFoundError: No module named 'tfdist.task'; import public names from tfdist itself, as "
            "`from tfdist import Task`",
        ),
        ("\ndef get_config():\n    assert 0\n", ", line 3: AssertionError"),
        ("raise ValueError('a\\nb\\x1b[31m\\ud800')", r", line 1: ValueError: a\nb\x1b[31m\ud800"),
        ("\nclass E(Exception):\n    def __str__(self): return 1 / 0\nraise E\n", ", line 4: E"),
        ("def get_config():\n    return get_config()\n", ", line 2: RecursionError: maximum recursion depth"),
        ("import sys\nsys.exit(0)\n", ", line 2: SystemExit: 0"),
        ("def get_config():\n    raise SystemExit('no')\n", ", line 2: SystemExit: no"),
        ("class E(BaseException): pass\nraise E('x')\n", ", line 2: E: x"),
        ("get_config = 3\n", ": TypeError: 'int' object is not callable"),
        ("def get_config(x):\n    pass\n", ": TypeError: get_config() missing 1 required positional argument: 'x'"),
        ("x = 1\0\n", ": SyntaxError: source code string cannot contain null bytes"),
        ("", ": the file defines no function get_config()."),
        (
            FILE.replace("global_batch_size", "global_batchsize"),
            ", line 5: TypeError: TrainConfig.__init__() got an unexpected keyword argument 'global_batchsize'; "
            "did you mean 'global_batch_size'?",
        ),
        (
            "from tfdist.config import ScheduleConfig\nScheduleConfig(warmup_step=9)\n",
            ", line 2: TypeError: ScheduleConfig.__init__() got an unexpected keyword argument 'warmup_step'; "
            "did you mean 'warmup_steps'?",
        ),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass Options:\n    depth: int = 1\nOptions(dept=2)\n",
            ", line 5: TypeError: Options.__init__() got an unexpected keyword argument 'dept'; did you mean 'depth'?",
        ),
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
    assert "Traceback" not in found[0] and found[0].isprintable()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n1 / 0\n", "ZeroDivisionError: division by zero (raised at {}:2)"),
        ("x = 1\n\ndef f(:\n", "SyntaxError: invalid syntax (raised at {}:3)"),
        ("import sys\nsys.exit('no')\n", "SystemExit: no (raised at {}:2)"),
    ],
)
def test_a_broken_module_that_the_file_imports_is_named_behind_the_files_own_line(
    write, tmp_path, monkeypatch, text, said
):
    monkeypatch.syspath_prepend(tmp_path)
    write(text, "config_helper.py")
    file = write(f"\nimport config_helper\n{FILE}")
    assert faults(file) == (f"{file}, line 2: {said.format(tmp_path / 'config_helper.py')}",)


def test_an_interrupt_in_the_file_is_not_taken_for_a_fault(write):
    with pytest.raises(KeyboardInterrupt):
        parse(write("raise KeyboardInterrupt\n"))


def test_an_attribute_that_the_file_sets_is_a_field(write):
    text = (
        FILE.replace("return ", "config = ")
        + "    config.epoch = 3\n    config.strategy.nam = 'x'\n    return config\n"
    )
    found = faults(write(text), "--config.seed=-1")
    assert found[0].startswith("config.epoch: unknown config field 'epoch'; did you mean 'epochs'? Known: task,")
    assert found[1].startswith("config.strategy.nam: unknown config field 'nam'; did you mean 'name'? Known: name,")
    assert found[2:] == ("seed must be 0 to 2147483647. Received: -1.",)


def test_what_cannot_be_shown_is_a_fault(write):
    text = "class A:\n    def __repr__(self): return 1 / 0\n" + FILE.replace("32", "32, seed=10**5000, epochs=A()")
    assert len(faults(write(text))) == 2
    assert "must be float. Received: 1000" in faults(write(FILE.replace("32", "32, learning_rate=10**400")))[0]


def test_a_file_that_is_missing_or_no_text_is_a_fault(tmp_path):
    assert faults(f"--config={tmp_path}/none.py") == (f"--config={tmp_path}/none.py: No such file or directory.",)
    assert faults(f"--config={tmp_path}") == (f"--config={tmp_path}: Is a directory.",)
    (tmp_path / "bytes.py").write_bytes(b"x = '\xe9'\n")
    assert "can't decode" in faults(f"--config={tmp_path}/bytes.py")[0]
    (tmp_path / "bytes.py").write_bytes(FILE.encode("utf-16"))
    assert faults(f"--config={tmp_path}/bytes.py")[0].startswith(f"--config={tmp_path}/bytes.py: SyntaxError: ")
    (tmp_path / "bytes.py").write_bytes(FILE.encode("utf-8-sig"))
    assert parse(f"--config={tmp_path}/bytes.py")
    (tmp_path / "loop.py").symlink_to("loop.py")
    assert "symbolic links" in faults(f"--config={tmp_path}/loop.py")[0]
    assert len(faults("--config=nul\0.py")) == 1


def test_faults_that_the_file_reports_are_kept(write):
    text = "from tfdist import ConfigError\ndef get_config():\n    raise ConfigError(['one', 'two'])\n"
    assert faults(write(text)) == ("one", "two")
    assert faults(write(text.replace("['one', 'two']", "[]"))) == (
        "internal error: a ConfigError was raised without a message.",
    )


def test_the_file_runs_once(write, capsys):
    parse(write(f"print('run')\n{FILE}"), "--config.epochs=2")
    assert capsys.readouterr().out == "run\n"


def test_the_files_annotations_are_not_made_texts(write, capsys):
    parse(write(f"def f(x: int): pass\nprint(f.__annotations__['x'] is int)\n{FILE}"))
    assert capsys.readouterr().out == "True\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_one_screen_of_common_fields_and_groups(capsys, flag):
    assert parse("--config=digits_topk", flag) is None
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40 and all(len(line) <= 120 for line in lines[:-1])
    assert lines[0] == "what it does" and lines[-1].startswith("Presets: default, digits,")
    flags = [line.split()[0].split("=")[0] for line in lines[1:-1]]
    assert flags[:3] == ["--config", "--workdir", "--overwrite"] and flags[-1] == "--helpfull"
    assert "  --config.compression.name=topk " in "\n".join(lines)
    groups = [
        field.name
        for field in dataclasses.fields(TrainConfig())
        if dataclasses.is_dataclass(getattr(TrainConfig(), field.name))
    ]
    assert [line.split()[0] for line in lines if "--help=" in line] == [f"--help={name}" for name in groups]


def test_help_of_a_group_explains_its_fields(capsys):
    assert parse("--help=strategy") is None
    shown = re.findall(r"^  --([\w.]+)=", capsys.readouterr().out, re.MULTILINE)
    assert shown == [path for path in PATHS if path.startswith("config.strategy.")]
    assert faults("--help=stratgy") == (
        "unknown group of fields 'stratgy'; did you mean 'strategy'? Known: backup, cluster, compression, monitoring, optimizer, schedule, "
        "strategy, task_options.",
    )


def test_the_full_help_prints_every_field_and_gives_nothing(capsys):
    assert parse("--config=no/such/file.py", "--helpfull") is None
    shown = capsys.readouterr().out
    assert shown.startswith("what it does\n") and "no/such/file.py" in shown.splitlines()[-1]
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
FIELDS = """
task task_options.filters task_options.dropout task_options.label_smoothing
strategy.name strategy.devices strategy.replicas strategy.transport strategy.bucket_bytes strategy.shard_optimizer strategy.weights_dtype
strategy.row_updates strategy.sync_every strategy.outer.learning_rate strategy.outer.momentum strategy.outer.nesterov strategy.batch_shares strategy.gather_loss_bytes
strategy.timeout_seconds strategy.placement strategy.max_staleness strategy.features
cluster.workers cluster.ps cluster.evaluator cluster.source cluster.hosts cluster.ps_hosts cluster.hostfile cluster.task cluster.warm cluster.join_seconds
cluster.ray cluster.cpus_per_worker cluster.gpus_per_worker
global_batch_size per_replica_batch_size epochs steps_per_epoch validation_freq callbacks initial_weights seed deterministic
optimizer.name compression.name learning_rate learning_rate_scaling
schedule.name schedule.warmup_steps schedule.warmup_epochs schedule.decay_steps schedule.end schedule.power
schedule.boundaries schedule.factor
precision nan_policy jit_compile steps_per_execution start_timeout grace_seconds check_weights
backup.save_freq backup.save_every_seconds backup.dir backup.keep backup.delete_checkpoint backup.save_before_preemption
max_restarts monitoring.update_freq monitoring.profile_steps monitoring.tracker
"""


def test_the_fields_and_flags_are_these(capsys):
    """A new one needs a reason: what is of one optimizer, compressor or task is an option of it."""
    assert [f"config.{field}" for field in FIELDS.split()] == PATHS
    parse("--helpfull")
    found = re.findall(r"^  (?:-h,)?--(?:\[no\])?(\w+):", capsys.readouterr().out, re.MULTILINE)
    assert found == ["help", "config", "hostfile", "hosts", "overwrite", "ps_hosts", "task", "workdir", "flagfile"]


names = st.one_of(
    st.sampled_from(PATHS),
    st.tuples(st.sampled_from(PATHS), st.sampled_from(["x", ".x", "[0]", ".", " "])).map("".join),
    st.text(max_size=8).map(lambda text: "config." + text),
    st.sampled_from(["config", "config.", "config.optimizer", "workdir", "flagfile", "undefok"]),
)
misspelt = st.tuples(st.sampled_from(PATHS), st.integers(7, 40), st.sampled_from(["", "x", "_", "é"])).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + 1 :]
)
values = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.booleans().map(str),
    st.sampled_from(["", "true", "none", "build", "mirrored", "json:dumps", ".:", "2", "9" * 5000]),
    st.text(st.characters(), max_size=8),  # with surrogates
)
arguments = st.one_of(
    st.tuples(st.sampled_from(["-", "--", "--no", "---", ""]), names | misspelt, st.just("="), values).map("".join),
    st.tuples(st.sampled_from(["--", "--no"]), names | misspelt).map("".join),
    st.just("--"),
    values,
)


@settings(max_examples=25)
@given(st.lists(arguments, max_size=4))
def test_any_arguments_give_a_config_or_a_config_error(tmp_path_factory, arguments):
    path = tmp_path_factory.getbasetemp() / "any.py"
    path.write_text(FILE)
    try:
        found = parse(f"--config={path}", *arguments)
    except ConfigError as e:
        assert e.faults
        for fault in e.faults:
            assert fault.strip() and fault.isprintable()
    else:
        assert found is None or (isinstance(found[0], TrainConfig) and isinstance(found[1], pathlib.Path))


def test_a_preset_is_known_by_its_name():
    config, workdir = parse("--config=digits_multi_worker", "--config.max-restarts=3")
    assert (config.strategy.name, config.cluster.workers, config.max_restarts) == ("multi_worker_mirrored", 2, 3)
    assert workdir == pathlib.Path("runs/digits_multi_worker")
    assert (
        "no preset; did you mean 'digits_mirrored'? Presets: default, digits," in faults("--config=digit_mirrored")[0]
    )


def test_the_configuration_of_a_run_repeats_it(tmp_path):
    config, _ = parse("--config=digits_topk", "--config.task_options.dropout=0.25", "--config.optimizer.nesterov")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(train.to_dict(config)))
    assert parse(f"--config={path}")[0] == config
    assert parse(f"--config={path}", "--config.epochs=99")[0].epochs == 99
    path.write_text('{"epoch": 3, "optimizer": {"momentun": 1, "name": "sgd"}}')
    found = faults(f"--config={path}")
    assert len(found) == 2 and "did you mean 'epochs'?" in found[0] and "did you mean 'momentum'?" in found[1]
    path.write_text('{"global_batch_size": 8, "optimizer": {"exclude_layers": ["x"], "name": "muon"}}')
    assert parse(f"--config={path}")[0].optimizer.exclude_layers == ("x",)
    for text in ("[]", "no", "[" * 100_000):
        path.write_text(text)
        assert str(path) in faults(f"--config={path}")[0]


def test_a_task_brings_its_options(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flags_own_task.py").write_text(
        "import dataclasses\nfrom tfdist.tasks.base import Task\n"
        "@dataclasses.dataclass\nclass Options:\n    width: int = 3\n    def faults(self):\n        return []\n"
        "@dataclasses.dataclass\nclass Needs:\n    width: int\n"
        "class Own(Task):\n    Options = Options\nclass Needing(Task):\n    Options = Needs\n"
    )
    config, _ = parse("--config=digits", "--config.task=flags_own_task:Own", "--config.task_options.width=8")
    assert (config.task, config.task_options.width) == ("flags_own_task:Own", 8)
    said = r"Needs\(\) of task 'flags_own_task:Needing' raises TypeError.*give all its fields defaults"
    with pytest.raises(ConfigError, match=said):
        parse("--config=default", "--config.task=flags_own_task:Needing")


def test_the_full_help_tells_of_each_field_and_of_the_given_configuration(capsys):
    assert parse("--config=digits_topk", "--helpfull") is None
    shown = capsys.readouterr().out
    assert "  --config.compression.name=topk\n" in shown
    about = {
        "optimizer.clipnorm=0.0": "0 means no clipping. At most one of `clipnorm`, `clipvalue` and `global_clipnorm` may be set.",
        "optimizer.momentum=0.9": "For sgd, rmsprop: 0.0; muon: 0.95.",
        "compression.compress_ratio=0.1": "The share of each gradient's values that `topk` sends, at least one value. For topk.",
        "compression.block=256": "Number of values that share a scale in `int8`; a power of two, at least 4. For int8.",
    }
    for field, text in about.items():
        assert shown.partition(f"  --config.{field}\n")[2].startswith(f"      {text}\n")
    assert "Presets: default, digits," in shown
