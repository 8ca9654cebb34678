"""README and docs: no dead link, no block that is not Python, no command or field that does not exist."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import io
import re
import shlex

import pytest

from tests.architecture.test_public_api import PUBLIC
from tests.docs.pages import PAGES, ROOT, anchors, blocks, commands, links, prose
from tfdist import CompressionConfig, TrainConfig
from tfdist import __main__ as tfdist_command
from tfdist.config import COMPRESSORS, OptimizerConfig, flags
from tfdist.config.optimizer import OPTIMIZERS

COMMANDS = sorted(
    {found[1].strip() for each in commands() if (found := re.search(r"(?:^| )tfdist (\w[^>&|]*)", each.text))}
)
TASKS = ("digits", "ratings", "synthetic")


def test_the_number_of_scripts_is_one():
    # Some kinds have several scripts.
    kinds = f"{sum(each.startswith('| ') for each in PAGES['docs/scripts.md'].splitlines()) - 1}"
    named = {page: re.findall(r"(\d+) kinds", prose(page)) for page in PAGES if page != "CHANGELOG.md"}
    assert {number for found in named.values() for number in found} == {kinds}
    assert sum(map(bool, named.values())) >= 4


def test_the_readmes_figures_are_those_of_the_scripts_and_benchmarks():
    rows = [each.strip("| ").split(" | ") for each in PAGES["docs/scripts.md"].splitlines() if each.count(" | ") == 4]
    equal = [sum(row[column].startswith("equal") for row in rows) for column in (2, 3)]
    readme = prose("README.md")
    assert f"{equal[0]} on two devices and {equal[1]} on two workers" in readme
    _, _, table = (ROOT / "tools/bench/RESULTS.md").read_text().partition("| model mlp, workers 2, rate host |")
    (ratio,) = re.findall(r"^\| none \|[^|]*\| ([\d.]+) ", table.partition("\n\n")[0], re.MULTILINE)
    assert f"takes {ratio} times that of PyTorch DDP" in readme


@pytest.mark.parametrize("page", PAGES)
def test_links_and_their_anchors_exist(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page} links to {link}"


def test_every_page_is_on_the_site():
    site = (ROOT / "mkdocs.yml").read_text()
    on_first_page = {link.partition("#")[0] for link in links("docs/index.md")} | {"index.md"}
    pages = {page[5:] for page in PAGES if page.startswith("docs/")}
    assert not [page for page in pages if f"- {page}\n" not in site]
    assert not pages - on_first_page


def test_long_pages_are_divided():
    for page in ("troubleshooting", "fault-tolerance", "configuration"):
        assert len(PAGES[f"docs/{page}.md"].split()) <= 2000, page
    first_screen = PAGES["docs/troubleshooting.md"].splitlines()[:40]
    assert any("a task hangs" in line and "(hangs.md#a-task-that-hangs)" in line for line in first_screen)


@pytest.mark.parametrize("block", list(blocks("python")), ids=lambda block: f"{block.page}-{len(block.text)}")
def test_python_blocks_are_python_and_import_what_exists(block):
    for node in ast.walk(compile(block.text, block.page, "exec", ast.PyCF_ONLY_AST)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tfdist":
            module = importlib.import_module(node.module)
            for alias in node.names:
                hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tfdist":
            assert node.attr in PUBLIC["tfdist"] or f"tfdist.{node.attr}" in PUBLIC, (
                f"{block.page} uses tfdist.{node.attr}"
            )


def fields(config: object, prefix: str = "") -> set[str]:
    """Returns the paths of a configuration's fields."""
    found = set()
    for field in dataclasses.fields(config):
        found.add(prefix + field.name)
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            found |= fields(value, f"{prefix}{field.name}.")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_fields_of_the_configuration_exist(page):
    known = set().union(*(fields(TrainConfig(task=task)) for task in TASKS)) | {
        "task_options.FIELD",
        "compression.OPTION",
        "FIELD",
        "field",
    }
    known |= {f"compression.{o}" for name in COMPRESSORS for o in CompressionConfig(name).option_fields()}
    known |= {f"optimizer.{o}" for name in OPTIMIZERS for o in OptimizerConfig(name).option_fields()}
    known |= {"task_options.units", "compression.scale"}  # of the examples in extending.md
    found = re.findall(r"--config\.([A-Za-z_]\w*(?:[.-]\w+)*)", PAGES[page])
    named = {name.replace("-", "_") for name in found}
    assert named <= known, f"{page} names {named - known}"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command, folder, monkeypatch):
    """In `make test`; test_commands.py runs them."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    name, *arguments = shlex.split(command)
    parse(name, arguments)


def parse(name: str, arguments: list[str]) -> None:
    """Has the command's own parser read the arguments; nothing is started."""
    if name == "train":
        flags.parse([name, *arguments], "")
    elif name == "launch":
        split = arguments.index("--")
        assert quietly([name, *arguments[:split], "--help"]) == 0 and arguments[split + 1 :]
    elif name == "cluster" and arguments[0] == "emit":
        assert quietly([name, *arguments]) == 0
    elif name == "cluster":
        assert [word for word in arguments if not word.startswith("-")] in (["show"], ["check"])
        assert quietly([name, *arguments, "--help"]) == 0
    elif name == "help":
        assert quietly([name, *arguments]) == 0
    elif name == "doctor":
        assert quietly([name, *arguments, "--help"]) == 0
    else:
        raise AssertionError(f"mark the block as shown only, or parse {name} here")


def quietly(words: list[str]) -> int:
    """Returns the exit code of `tfdist` with these words; what it prints is not shown."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return tfdist_command.main(["tfdist", *words])


def test_the_search_for_commands_finds_them():
    found = {command.split()[0] for command in COMMANDS} - {"help"}
    assert found == tfdist_command.COMMANDS.keys() - {"backup", "stacks", "verify"}, (
        "those of backups, and of a job that runs, need one; tests/verify runs the third"
    )
    assert len(COMMANDS) > 20


def test_pages_say_tfdist_and_not_its_modules():
    """But cli.md, in one sentence; a test of your own and a notebook start the module of their own Python."""
    spoken = re.compile(r"python -m tfdist\b")
    assert [page for page, text in PAGES.items() if spoken.search(text)] == ["docs/cli.md"]
    scripts = [*(ROOT / "examples").rglob("*.py"), *(ROOT / "configs").glob("*.py"), *(ROOT / "tfdist").rglob("*.txt")]
    assert not [script for script in scripts if spoken.search(script.read_text())]
    assert not [page for page, text in PAGES.items() if "--config=configs/" in text], "a preset works in any folder"


@pytest.mark.parametrize(("package", "name"), [(p, n) for p, names in PUBLIC.items() for n in names if not n.isupper()])
def test_every_public_name_is_in_the_api(package, name):
    assert re.search(rf"^::: tfdist\.[\w.]*\.{name}$", PAGES["docs/api.md"], re.MULTILINE)
