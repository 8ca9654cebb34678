"""The verdicts of `tfdist verify`: pure functions of the records of the arms. No TensorFlow here.

A is one device, B the same in another process, C the wished strategy, and D is C, killed and resumed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

EQUAL, DIFFERS, KNOWN, NOTE, SKIPPED = "equal", "differs", "known difference", "note", "not compared"

Entry = Mapping[str, Any]  # a line of a record
Examples = tuple[int, int]  # their number, and the sum of their checksums

_MASK = 2**64 - 1
_SCALE = 1e-3  # the ratio of two updates that count as equal in size differs from 1 by at most this
_FACTOR = 0.05  # the same from the number of replicas, or its inverse
_ROUNDING = 1e-5  # of the first update; later ones grow with the root of their number
_ROUNDING_OF_TYPE = {"bfloat16": 1e-2, "float16": 2e-3}  # the same where layers compute in this type
_METRIC = 1e-4
_REPEAT = (
    "set the seed of all random numbers at the top of the script, by keras.utils.set_random_seed, and read no clock"
)

_DIVIDED_TWICE = "the loss is divided twice, or is a sum: take the mean over the examples that the step receives"
_NOT_DIVIDED = "the gradient is not divided: take the mean over the examples of all replicas"
_OWN_PART = "does clipping, a loss or a gradient of your own use each replica's part of the batch alone, or does the step draw random numbers?"
_UNEQUAL_METRIC = "is it averaged over replicas of unequal batches, or a sum? Use a metric of Keras, or tfdist.total"


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        check: Its name.
        status: One of the constants above.
        text: The numbers, and the probable cause of a difference.
        update: The first update that differs, or None.
    """

    check: str
    status: str
    text: str
    update: int | None = None


class Arm:
    """The records of one arm.

    Attributes:
        tasks: The lines of each task's record, by its name.
        killed_at: The update after which a task was killed; None if none was.
        failed: Whether its command has failed, so that its tasks may have ended at different updates.
    """

    def __init__(self, tasks: Mapping[str, Sequence[Entry]], killed_at: int | None = None, failed: bool = False):
        self.failed = failed
        self.tasks = {name: list(tasks[name]) for name in sorted(tasks)}
        self.killed_at = killed_at

    @functools.cached_property
    def updates(self) -> dict[str, dict[int, Entry]]:
        """The last record of each update, by task."""
        found = {}
        for task, entries in self.tasks.items():
            found[task] = {entry["update"]: entry for entry in entries if entry["kind"] == "update"}
        return found

    @property
    def first(self) -> dict[int, Entry]:
        """The updates of the first task, which is the chief."""
        return next(iter(self.updates.values()), {})

    @property
    def heads(self) -> list[Entry]:
        """The description of each `fit`, by the first task."""
        return [entry for entry in next(iter(self.tasks.values()), []) if entry["kind"] == "fit"]

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return max((head["replicas"] for head in self.heads), default=1)

    @property
    def rounding(self) -> float:
        """The part of a first update that is rounding."""
        types = {dtype for head in self.heads for dtype in head["types"].values()}
        return max((_ROUNDING_OF_TYPE.get(dtype, _ROUNDING) for dtype in types), default=_ROUNDING)

    def examples(self, update: int) -> Examples | None:
        """Returns the number of an update's examples over all tasks and the sum of their checksums; None if a task did not record them."""
        count = total = 0
        for entries in self.updates.values():
            if update not in entries or entries[update]["examples"] is None:
                return None
            number, checksum = entries[update]["examples"]
            count += number
            total = (total + checksum) & _MASK
        return count, total


def judge(a: Arm, b: Arm | None, c: Arm | None, d: Arm | None, name: str) -> list[CheckResult]:
    """Returns the verdicts on the arms that have run, in the order in which a cause explains the next ones; `name` is that of C, as `2 workers`."""
    verdicts = [_repeats(a, b)] if b else []
    if c is None:
        return verdicts
    known = known_differences(c)
    verdicts += [same_examples(a, c, name), ranks_agree(c), equal_bits(a, c, name)]
    # Other examples, or ranks that differ, make all later checks differ; another size changes the metrics.
    cause = _first_difference(verdicts)
    if not cause:
        verdicts += [within_rounding(a, b, c, known), scale(a, c, name, known)]
        cause = _first_difference(verdicts)
    if not cause:
        verdicts.append(metrics(a, c, known))
    done = {verdict.check for verdict in verdicts}
    for check in ("within rounding", "scale", "loss and metrics"):
        if check not in done:
            verdicts.append(CheckResult(check, SKIPPED, f"{cause}: differs, and so does this"))
    verdicts.append(precision(a, c))
    if d:
        verdicts.append(resume(c, d))
    if known:
        verdicts.append(CheckResult("known differences", KNOWN, "; ".join(known)))
    return [*verdicts, _speed(a, c, name)]


def _first_difference(verdicts: Sequence[CheckResult]) -> str:
    return next((verdict.check for verdict in verdicts if verdict.status == DIFFERS), "")


def known_differences(c: Arm) -> list[str]:
    """Returns why an arm cannot equal one device, with the remedy."""
    known = []
    for head in c.heads:
        if head["asynchronous"]:
            known.append(
                "parameter_server is asynchronous: here its steps run one after the other, in your training they overlap; "
                "use multi_worker_mirrored for equal results"
            )
        if head["replicas"] > 1:
            for text, layers in itertools.groupby(
                sorted(head["differs"], key=head["differs"].get), head["differs"].get
            ):
                first, *others = layers
                known.append(f"{first} (and {len(others)} more) {text}" if others else f"{first} {text}")
        known += [
            f"gradients are compressed by {name}: leave out the compression to compare" for name in head["compression"]
        ]
    return list(dict.fromkeys(known))


def _repeats(a: Arm, b: Arm) -> CheckResult:
    result = functools.partial(CheckResult, "one device repeats itself")
    for left, right in zip(a.heads, b.heads, strict=False):
        for path, checksum in left["initial"].items():
            if right["initial"].get(path) != checksum:
                return result(DIFFERS, f"{path} begins with other values in another process: {_REPEAT}", 0)
    for update, one, other in _common(a, b):
        if one["examples"] != other["examples"]:
            return result(DIFFERS, f"update {update} used other examples in another process: {_REPEAT}", update)
    largest = max((relative for _, relative, _ in _differences(a, b)), default=0.0)
    if largest:
        return result(NOTE, f"two processes differ by {largest:.1e} of an update: the rounding of this machine")
    return result(EQUAL, f"bit for bit, {_count(a, b)} updates")


def same_examples(a: Arm, c: Arm, name: str) -> CheckResult:
    """Compares the examples of each update as multisets, which the split among replicas does not change."""
    result = functools.partial(CheckResult, "same examples")
    pairs = [(update, a.examples(update), c.examples(update)) for update, _, _ in _common(a, c)]
    recorded = [(update, left, right) for update, left, right in pairs if left and right]
    for update, left, right in recorded:
        if left != right:
            begin = f"update {update}: {name} used other examples than one device"
            return result(DIFFERS, f"{begin}{_cause_of_examples(c, update, recorded)}", update)
    if not recorded:
        return result(SKIPPED, "the workers read their own data, which are not recorded")
    return result(EQUAL, f"{len(recorded)} updates")


def _cause_of_examples(c: Arm, update: int, recorded: Sequence[tuple[int, Examples, Examples]]) -> str:
    parts: dict[tuple[int, ...], str] = {}
    for task, entries in c.updates.items():
        other = parts.setdefault(tuple(entries[update]["examples"]), task)
        if other != task:
            return f": {other} and {task} read the same ones. Give each worker its own part of the data, by context.shard or dataset.shard"
    left, right = next((left, right) for number, left, right in recorded if number == update)
    if left[0] != right[0]:
        return f": {right[0]} in place of {left[0]}. Divide the global batch size by the number of replicas in a dataset function"
    if sum(left[1] - right[1] for _, left, right in recorded) & _MASK == 0:
        return ": all updates together used the same ones, in another order. Shuffle before sharding, with one seed on all workers"
    return (
        ": do the workers shuffle or draw with different seeds? Shuffle before sharding, with one seed on all workers"
    )


def ranks_agree(c: Arm) -> CheckResult:
    """Compares variables, learning rates and counters of all tasks, and of the replicas of each."""
    result = functools.partial(CheckResult, "ranks agree")
    chief = next(iter(c.updates))
    for update, expected in c.first.items():
        for task, entries in c.updates.items():
            if update in entries:
                text = _disagreement(task, entries[update], chief, expected)
                if text:
                    return result(DIFFERS, f"update {update}: {text}", update)
            elif not c.failed:
                text = f"{task} has made {max(entries, default=0)} updates, {chief} more: does one rank leave its loop alone?"
                return result(DIFFERS, text, update)
    if len(c.tasks) == 1 and c.replicas == 1:
        return result(SKIPPED, "one replica")
    return result(EQUAL, f"{len(c.first)} updates on {', '.join(c.tasks)}; {c.replicas} replicas")


def _disagreement(task: str, entry: Entry, chief: str, expected: Entry) -> str:
    """Returns in what the replicas of a task differ from each other, or from those of the chief; empty if they agree."""
    for field, what in (("rate", "learning rate"), ("iterations", "number of updates")):
        if entry[field] != expected[field]:
            return (
                f"the {what} of {task} is {_shown(entry[field])}, that of {chief} {_shown(expected[field])}. "
                "Does a callback set it on one rank alone? Set it on all ranks"
            )
    apart = [path for path, variable in entry["variables"].items() if not variable["agrees"]]
    where = f"the replicas of {task} differ"
    if not apart:
        apart = [_unequal(entry, expected)]
        where = f"{task} differs from {chief}"
    if not apart[0]:
        return ""
    return f"{where} in {apart[0]}. Does the step apply a gradient that is not reduced? Apply it by an optimizer of the model"


def _shown(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers)


def equal_bits(a: Arm, c: Arm, name: str) -> CheckResult:
    """Compares the checksums of the variables. Unequal bits alone are no fault: the order of a sum changes its rounding."""
    result = functools.partial(CheckResult, "equal bits")
    for update, left, right in _common(a, c):
        path = _unequal(left, right)
        if path:
            return result(NOTE, f"the bits of {path} differ from update {update} on", update)
    return result(EQUAL, f"{name} = one device, {_count(a, c)} updates")


def _unequal(left: Entry, right: Entry) -> str:
    """Returns the first variable whose bits differ, or an empty text."""
    for path, variable in left["variables"].items():
        if variable["checksum"] != right["variables"].get(path, {}).get("checksum"):
            return path
    return ""


def within_rounding(a: Arm, b: Arm | None, c: Arm, known: Sequence[str] = ()) -> CheckResult:
    """Compares the size of the difference of two updates with the rounding of this machine.

    An optimizer such as Adam divides the rounding of a gradient near 0 by its own size: such an update differs, its gradient does not.
    """
    result = functools.partial(CheckResult, "within rounding")
    envelope = {update: relative for update, relative, _ in _differences(a, b)} if b else {}
    largest = 0.0
    where = ""
    amplified = False
    for update, relative, path in _differences(a, c):
        bound = max(10 * envelope.get(update, 0.0), c.rounding * math.sqrt(update))
        if not relative <= bound:  # also for NaN
            text = (
                f"update {update} differs by {relative:.1e} of its size, most in {path}; rounding explains {bound:.1e}"
            )
            # Later gradients differ by the differences of earlier updates, too.
            if not _gradients_differ(a.first[update], c.first[update]) <= max(bound, largest):
                return result(KNOWN if known else DIFFERS, text, update)
            amplified = True
        if relative > largest:
            largest = relative
            where = f", in {path}"
    text = f"largest difference {largest:.1e} of an update{where}"
    if amplified:
        return result(NOTE, f"{text}; gradients agree, and the optimizer amplifies their rounding")
    return result(EQUAL, text)


def _differences(left: Arm, right: Arm) -> Iterator[tuple[int, float, str]]:
    """Yields for each update the estimated norm of the difference, divided by the update's norm, and the variable with the largest part."""
    for update, one, other in _common(left, right):
        parts = {path: _square(variable, other["variables"][path]) for path, variable in one["variables"].items()}
        if parts:
            relative = _ratio(math.sqrt(sum(parts.values())), _size(one))
            yield update, relative, max(parts, key=lambda path: parts[path])


def _gradients_differ(one: Entry, other: Entry) -> float:
    """Returns the estimated norm of the difference of two gradients, divided by the norm of the first."""
    left = one["gradient"]
    right = other["gradient"]
    if not left or not right:
        return math.inf
    return _ratio(math.sqrt(_square(left, right)), left["norm"])


def _square(one: Entry, other: Entry) -> float:
    # The mean of the squares of sums with random signs is the square of the norm.
    sketches = zip(one["sketch"], other["sketch"], strict=True)
    return statistics.fmean((x - y) ** 2 for x, y in sketches)


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return math.inf if part else 0.0


def scale(a: Arm, c: Arm, name: str, known: Sequence[str] = ()) -> CheckResult:
    """Compares the sizes of gradients and updates: a factor between them is a loss that is divided twice, or not at all."""
    result = functools.partial(CheckResult, "scale")
    ratios: dict[str, list[float]] = {"gradients": [], "updates": []}
    for _, left, right in _common(a, c):
        if left["gradient"] and right["gradient"] and left["gradient"]["norm"]:
            ratios["gradients"].append(right["gradient"]["norm"] / left["gradient"]["norm"])
        if _size(left):
            ratios["updates"].append(_size(right) / _size(left))
    ratios = {what: values for what, values in ratios.items() if values}
    for what, values in ratios.items():
        # At the first update that is not 0 the weights are equal. Random layers change each ratio, but hardly the median.
        ratio = statistics.median(values) if known else values[0]
        if abs(ratio - 1) <= max(_SCALE, c.rounding):
            continue
        text = f"{what} of {name} are {ratio:.4g} of one device's"
        for factor, cause in ((1 / c.replicas, _DIVIDED_TWICE), (c.replicas, _NOT_DIVIDED)):
            if c.replicas > 1 and abs(ratio / factor - 1) < _FACTOR:
                return result(DIFFERS, f"{text}: {cause}", 1)
        if known:
            return result(KNOWN, text, 1)
        return result(DIFFERS, f"{text}: {_OWN_PART}", 1)
    if not ratios:
        return result(SKIPPED, "no update changed a variable")
    shown = ", ".join(f"{what} {values[0]:.6f}" for what, values in ratios.items())
    return result(EQUAL, f"{shown} of one device's")


def _size(entry: Entry) -> float:
    return math.sqrt(sum(variable["norm"] ** 2 for variable in entry["variables"].values()))


def metrics(a: Arm, c: Arm, known: Sequence[str] = ()) -> CheckResult:
    """Compares the logs of each update."""
    result = functools.partial(CheckResult, "loss and metrics")
    tolerance = max(_METRIC, c.rounding)
    for update, left, right in _common(a, c):
        for metric, value in left["logs"].items():
            other = right["logs"].get(metric, math.nan)
            both_nan = math.isnan(value) and math.isnan(other)
            if both_nan or math.isclose(value, other, rel_tol=tolerance, abs_tol=tolerance):
                continue
            text = f"update {update}: {metric} is {other:.7g} in place of {value:.7g}"
            if known:
                return result(KNOWN, text, update)
            return result(DIFFERS, f"{text}: {_UNEQUAL_METRIC}", update)
    return result(EQUAL, f"{_count(a, c)} updates")


def precision(a: Arm, c: Arm) -> CheckResult:
    """Compares the types in which layers compute with the global policy, and those of both arms."""
    result = functools.partial(CheckResult, "precision used")
    for left, right in zip(a.heads, c.heads, strict=False):
        types = right["types"]
        for path, dtype in left["types"].items():
            if types.get(path, dtype) != dtype:
                text = f"{path} computes in {types[path]}, on one device in {dtype}: set one policy"
                return result(DIFFERS, text)
        policy = right["policy"]
        others = [path for path, dtype in types.items() if dtype != policy.removeprefix("mixed_")]
        if policy != "float32" and others and len(others) == len(types):
            text = f"the policy is {policy}, and all layers compute in {types[others[0]]}: set the policy before you create the layers"
            return result(DIFFERS, text)
        if others:
            return result(NOTE, f"the policy is {policy}; in another type compute {', '.join(others)}")
    return result(EQUAL, ", ".join(sorted({dtype for head in c.heads for dtype in head["types"].values()})))


def resume(c: Arm, d: Arm) -> CheckResult:
    """Compares the killed and resumed arm with the undisturbed one, to the bit."""
    result = functools.partial(CheckResult, "resume exact")
    if d.killed_at is None:
        return result(SKIPPED, "the training ended before the update at which it was to be killed")
    restored = d.heads[1]["update"] if len(d.heads) > 1 else 0
    for task, entries in d.tasks.items():
        for entry in entries:
            update = entry["update"]
            expected = c.updates.get(task, {}).get(update)
            if entry["kind"] != "update" or expected is None:
                continue
            where = f"update {update}, killed after {d.killed_at}, resumed after {restored}"
            if entry["examples"] != expected["examples"]:
                text = f"{where}: other examples than without the kill. Does the script skip, shuffle or draw data by itself after a restart?"
                return result(DIFFERS, text, update)
            path = _unequal(expected, entry)
            if path:
                text = f"{where}: the bits of {path} differ. Does the script keep state that no backup holds? Give its callback state_dict and load_state_dict"
                return result(DIFFERS, text, update)
    last = max(d.first, default=0)
    if not d.failed and last < max(c.first, default=0):
        text = f"the resumed training ended after update {last}: does the script skip data after a restart?"
        return result(DIFFERS, text, last)
    if not restored:
        text = "the restart found no backup and trained from the beginning: create a tfdist.Trainer, whose fit is backed up"
        return result(NOTE, text)
    return result(EQUAL, f"killed after update {d.killed_at}, resumed after {restored}, equal bits until {last}")


def _speed(a: Arm, c: Arm, name: str) -> CheckResult:
    seconds = []
    for arm in (a, c):
        times = [entry["time"] for entry in arm.first.values()]
        # The first updates compile.
        gaps = [end - begin for begin, end in itertools.pairwise(times[2:])]
        seconds.append(statistics.median(gaps) * 1000 if gaps else math.nan)
    size = max((head["bytes"] for head in c.heads), default=0)
    text = f"{seconds[1]:.1f} ms an update of {name}, {seconds[0]:.1f} ms of one device, both with the recording; gradients of {size:,} bytes"
    return CheckResult("speed", NOTE, text)


def _common(left: Arm, right: Arm) -> Iterator[tuple[int, Entry, Entry]]:
    for update in sorted(left.first.keys() & right.first.keys()):
        yield update, left.first[update], right.first[update]


def _count(left: Arm, right: Arm) -> int:
    return len(left.first.keys() & right.first.keys())


def conclusion(verdicts: Sequence[CheckResult], name: str, updates: int) -> str:
    """Returns the result in one line."""
    statuses = {verdict.check: verdict.status for verdict in verdicts}
    found = [check for check, status in statuses.items() if status == DIFFERS]
    if found:
        return f"{name} is not 1 device: {', '.join(found)}"
    if "equal bits" not in statuses:
        return f"1 device repeats itself, {updates} updates"
    how = "within rounding"
    if statuses["equal bits"] == EQUAL:
        how = "bit for bit"
    elif "known differences" in statuses:
        how = "but for known differences"
    line = f"{name} = 1 device, {how}, {updates} updates"
    if statuses.get("resume exact") == EQUAL:
        line += "; resume exact"
    return line
