"""`RESULTS.md` and its plots, of the records in `results/`."""

from __future__ import annotations

import importlib
import importlib.util
import math
import pathlib
import statistics
from collections.abc import Sequence

from tools.bench.record import Record, read, spread

BENCHES = (
    "link",
    "peers",
    "split",
    "scale",
    "accuracy",
    "slow_network",
    "codec",
    "step",
    "ps",
    "recovery",
    "startup",
    "inputs",
    "tables",
    "mesh",
    "ray_jobs",
)
FOLDER = pathlib.Path(__file__).parent
HEAD = """# Results

Written by `python -m tools.bench`, never by hand: raw samples are in [results](results). A figure is the median over rounds, and
in brackets the least and the most; in a round all contenders of a table had their turn, and ratios are of the same round. Alike
for all: oneDNN (`TF_ENABLE_ONEDNN_OPTS=1`); on limited links a core for each task where there are enough; memory that is kept
(`MALLOC_...`), but in `startup`.
"""


def write(folder: pathlib.Path) -> None:
    """Writes `RESULTS.md` and the plots of all records in a folder's `results/`."""
    found = {name: list(read(path)) for name in BENCHES if (path := _samples(folder, name)).exists()}
    if found and not importlib.util.find_spec("matplotlib"):
        print("Plots are left out: matplotlib is not installed (pip install '.[bench]').")
        for name in found:  # one of other samples would be left
            _picture(folder, name).unlink(missing_ok=True)
    elif found:
        for name, records in found.items():
            plot(records, _picture(folder, name))
    (folder / "RESULTS.md").write_text(render(folder))


def _samples(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / "results" / f"{name}.jsonl"


def _picture(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / "results" / f"{name}.png"


def render(folder: pathlib.Path) -> str:
    """Returns the text of `RESULTS.md`."""
    parts = [HEAD]
    for name in BENCHES:
        if not (path := _samples(folder, name)).exists():
            continue
        about = importlib.import_module(f"tools.bench.{name}").__doc__ or ""
        parts.append(f"## {name}\n\n{about.strip()}\n")
        if _picture(folder, name).exists():
            parts.append(f"![{name}](results/{name}.png)\n")
        parts += [table(record, folder) + "\n" for record in read(path)]
    return "\n".join(parts)


def table(record: Record, folder: pathlib.Path) -> str:
    """Returns a record as a Markdown table, with the columns that follow from it and from others' in the folder's `results/`."""
    derived = getattr(importlib.import_module(f"tools.bench.{record.bench}"), "derived", None)
    case = ", ".join(f"{key} {value}" for key, value in record.case.items())
    columns = record.columns | (derived(record, folder / "results") if derived else {})
    head = [f"{case}", record.unit, *(["ratio"] if record.against else []), *columns]
    lines = [head, ["---"] * len(head)]
    for name, values in record.samples.items():
        cells = [name, spread(values, 1 if statistics.median(values) >= 10 else 2)]
        if record.against:
            other = record.against.get(name)
            cells.append(f"{spread(record.ratios(name), 2)} x {other}" if other else "")
        cells += [f"{found:.4g}" if (found := values.get(name)) is not None else "" for values in columns.values()]
        lines.append(cells)
    versions = ", ".join(f"{package} {version}" for package, version in record.versions.items())
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    taken = max(len(values) for values in record.samples.values())
    return f"{rows}\n\n{record.note + ' ' if record.note else ''}Samples: {taken}. {record.date}; {record.machine}; {versions}."


def plot(records: Sequence[Record], path: pathlib.Path) -> None:
    """Draws a panel for each record: medians, from the least to the most, and floors or the model's figures where there are any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    wide = min(3, len(records))
    high = math.ceil(len(records) / wide)
    most = max(len(record.samples) for record in records)
    figure, axes = pyplot.subplots(high, wide, figsize=(5 * wide, (1 + 0.28 * most) * high), squeeze=False)
    for axis in axes.flat[len(records) :]:
        axis.axis("off")
    for axis, record in zip(axes.flat, records, strict=False):
        names = list(record.samples)
        medians = [statistics.median(values) for values in record.samples.values()]
        below = [median - min(values) for median, values in zip(medians, record.samples.values(), strict=True)]
        above = [max(values) - median for median, values in zip(medians, record.samples.values(), strict=True)]
        axis.barh(names, medians, xerr=[below, above], color="tab:blue", ecolor="black", capsize=2)
        mark, marked = next(
            ((name, values) for name, values in record.columns.items() if name.startswith(("floor", "model"))), ("", {})
        )
        axis.scatter(list(marked.values()), list(marked), color="tab:red", marker="|", s=150, zorder=3)
        axis.invert_yaxis()
        axis.set_xlabel(record.unit + (f", red: {mark.partition(',')[0]}" if marked else ""))
        axis.set_title(", ".join(f"{key} {value}" for key, value in record.case.items()), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
