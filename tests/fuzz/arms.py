"""Where the cases of the fuzz test are trained: replicas of this process, two workers, or a parameter server's one worker.

The latter two are processes of their own, which train the cases of many seeds one after another.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.fuzz import cases, later_draws, state_draws
from tests.fuzz.cases import Case
from tests.helpers import fork_server
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options

ROOT = pathlib.Path(__file__).parents[2]
ARMS = ("replicas", "workers", "servers")
SEEDS_OF_A_CLUSTER, SECONDS_OF_A_CLUSTER = 8, 420


def draw(seed: int, arm: str) -> Case:
    """Returns the case of a seed, with what an arm can train."""
    case = cases.draw(seed)
    if arm == "workers":
        case = dataclasses.replace(case, replicas=2, pipelines=2)
        is_alone = case.loss in (*cases.NEW_LOSSES, *cases.COMPARING) or case.override.startswith("metrics")
        changed = later_draws.alone(case) if is_alone else {}
        return cases.without_refused(dataclasses.replace(case, **changed))
    if arm == "servers":  # one worker, so that each step is a plain one
        # Neither is a `LossScaleOptimizer` possible there.
        refused = ("gradient_accumulation_steps", "ema_overwrite_frequency")
        options = {name: None if name in refused else value for name, value in case.options.items()}
        changed = state_draws.on_servers(case)
        if case.use == "sharp":  # takes a gradient at weights that the step has assigned
            changed["use"] = "global norm"
        return dataclasses.replace(
            case, replicas=1, compression=None, jit=False, eager=False, scales=False, options=options, **changed
        )
    if case.replicas > 1 and cases.gathers(case):
        return dataclasses.replace(case, eager=False)  # several replicas of one process gather nothing then, and say so
    return case


def run(arm: str, seeds: Sequence[int], minutes: float = 1e9) -> Iterator[dict[str, Any]]:
    """Trains the cases of seeds on clusters until they, or the time, are over. Yields each one's result."""
    left, end = list(seeds), time.monotonic() + 60 * minutes
    while left and time.monotonic() < end:
        part, left = left[:SEEDS_OF_A_CLUSTER], left[SEEDS_OF_A_CLUSTER:]
        found, log = _run_cluster(arm, part)
        failed = next((seed for seed in part if seed not in found), None)
        errors = [seed for seed in part if seed in found and found[seed].get("ends")]
        if failed is not None and not errors:
            found[failed] = {"seed": failed, "case": str(draw(failed, arm)), "differences": [f"no result: {log}"]}
            errors = [failed]
        yield from (found[seed] for seed in part if seed in found)
        if errors:  # which has ended the cluster
            left = [seed for seed in part if seed not in found] + left


def _run_cluster(arm: str, seeds: Sequence[int]) -> tuple[dict[int, dict[str, Any]], str]:
    """Returns the results of one cluster, and the end of what it has said."""
    with tempfile.TemporaryDirectory() as folder:
        results, shown = pathlib.Path(folder, "results"), io.BytesIO()
        words = fork_server.command("tests.fuzz.program", f"--arm={arm}", *map(str, seeds))
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "FUZZ_RESULTS": str(results)}
        environ.pop("TF_CONFIG", None)
        cluster = local_cluster(2) if arm == "workers" else local_cluster(1, 1)
        command = ["timeout", str(SECONDS_OF_A_CLUSTER), *words]
        Launcher(Options(command, cluster, pathlib.Path(folder, "logs"), environ), output=shown).run()
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        return {each["seed"]: each for each in lines}, shown.getvalue().decode(errors="replace")[-1500:]
