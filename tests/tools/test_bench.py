"""The benchmarks' roof: what is measured is what is planned, and RESULTS.md says what the samples say."""

from __future__ import annotations

import json
import pathlib
import re
import statistics
import subprocess
import sys

import pytest

from tools import netlab
from tools.bench import accuracy, link, record, report, scale

ROOT = pathlib.Path(__file__).parents[2]


def bench(out, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "tools.bench", *arguments, f"--out={out}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(netlab.missing()), reason=netlab.missing())
def test_links_carry_what_is_planned(tmp_path):
    only = "model=mlp,workers=2,rate=unlimited"
    done = bench(tmp_path, "link", f"--only={only}", "--contenders=none/0,none,bf16,int8", "--rounds=1")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = record.read(tmp_path / "results" / "link.jsonl")
    sent, planned = found.columns["sent, MB"], found.columns["planned, MB"]
    assert planned["none"] == planned["none/0"] > 42 and planned["bf16"] == pytest.approx(planned["none"] / 2, rel=0.01)
    for name in ("none/0", "none", "bf16", "int8"):
        assert sent[name] == pytest.approx(planned[name], rel=0.05)
        assert planned[name] > 10 and len(found.samples[name]) == 1 and found.samples[name][0] > 0
    assert "| bf16 |" in (tmp_path / "RESULTS.md").read_text()


def rows(text):
    """Yields the tables of a text: case, and cells by contender and column."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()]
        yield head, {cells[0]: dict(zip(head[1:], cells[1:], strict=True)) for cells in lines}


def test_the_results_are_the_samples_medians():
    """Of the committed file: none of its figures is written by hand."""
    text = (report.FOLDER / "RESULTS.md").read_text()
    assert report.render(report.FOLDER) == text
    tables = list(rows(text))
    records = [
        found
        for path in (report.FOLDER / "results").glob("*.jsonl")
        for found in (json.loads(line) for line in path.read_text().splitlines())
    ]
    assert records and len(tables) == len(records)
    for found in records:
        case = ", ".join(f"{key} {value}" for key, value in found["case"].items())
        candidates = [cells for head, cells in tables if head[:2] == [case, found["unit"]]]
        same = [cells for cells in candidates if list(cells) == list(found["samples"])]
        assert any(
            all(agrees(cells[name][found["unit"]], values) for name, values in found["samples"].items())
            for cells in same
        ), case


def agrees(cell, values):
    median, least, most = map(float, re.fullmatch(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", cell).groups())
    expected = statistics.median(values), min(values), max(values)
    return (median, least, most) == pytest.approx(expected, abs=0.051 if median >= 10 else 0.0051)


def a_record(**changes):
    samples = {"none": [2.0, 4.0, 3.0], "bf16": [1.0, 1.0, 3.0]}
    return record.Record("link", {"model": "mlp"}, "ms", samples, record.against("none", samples), **changes)


def test_ratios_are_of_the_same_round(tmp_path):
    assert a_record().ratios("bf16") == [0.5, 0.25, 1.0]
    assert "| bf16 | 1.00 (1.00 to 3.00) | 0.50 (0.25 to 1.00) x none |" in report.table(a_record(), tmp_path)
    assert "| none | 3.00 (2.00 to 4.00) |  |" in report.table(a_record(), tmp_path)


def test_a_case_that_is_measured_anew_is_replaced(tmp_path):
    path = tmp_path / "link.jsonl"
    record.write(path, [a_record(note="first")])
    record.write(path, [a_record(note="second")])
    assert [found.note for found in record.read(path)] == ["second"]


def test_the_floor_is_wire_and_latency():
    assert link.floor(100.0, 2, 0.5, 50.0) == 2.5
    assert link.floor(0.0, 1, 0.5, 50.0) == 0


def test_the_time_to_an_accuracy_is_of_the_steps_that_were_measured_beside_it(tmp_path):
    steps = record.Record("accuracy", accuracy.CASES[0], "steps", {"none": [40, 36, 44], "bf16": [50, 60, 40]})
    assert "time to accuracy" not in report.table(steps, tmp_path)
    samples = {"none": [3000.0, 3600.0, 3200.0], "other": [1.0, 1.0, 1.0]}
    record.write(tmp_path / "results" / "link.jsonl", [record.Record("link", accuracy.LINK, "ms", samples)])
    table = report.table(steps, tmp_path)
    assert "| steps | MLP's step, ms | time to accuracy, s |" in table
    assert "| none | 40.0 (36.0 to 44.0) | 3200 | 128 |" in table
    assert "| bf16 | 50.0 (40.0 to 60.0) |  |  |" in table


def test_an_extrapolation_says_so():
    case = next(case for case in scale.CASES if case["workers"] == 512)
    found = scale.run(case, 1)
    assert "Not measured" in found.note
    none, bf16 = (found.samples[name][0] for name in ("none", "bf16"))
    # 2 (N - 1) messages, and 2 (N - 1) / N of 42 MB.
    assert none == pytest.approx(2 * 511 + 2 * 511 / 512 * 42.06e6 / scale.SPEED * 1000, rel=0.01)
    assert none - 2 * 511 == pytest.approx(2 * (bf16 - 2 * 511), rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["link", "--only=modle=mlp"], "--only=modle=mlp fits no case. There are model=mlp, workers=2, rate=unlimited"),
        (["all", "--only=workers=3"], "--only=workers=3 fits no case. There are model=mlp"),
        (["link", "--only=mlp"], "--only wants name=value. Received: 'mlp'."),
        (["lnk"], "invalid choice: 'lnk'"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, said):
    done = bench(tmp_path, *arguments)
    assert done.returncode and said in done.stderr
