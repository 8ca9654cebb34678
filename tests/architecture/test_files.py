"""Files in folders that other users may write to are opened by `runtime/files.py` alone: it follows no link, and waits for no FIFO."""

from __future__ import annotations

import ast
import collections

from tests.architecture.sources import MODULES, tree

OPENS = {"open", "fdopen", "read_text", "write_text", "read_bytes", "write_bytes", "copyfile", "copy2"}
CHECKED = ("open_own(", "open_regular(", "self._open()", "descriptor", "pipe", "reader", "output")  # descriptors
METHODS = ("door.open(", "self.source.open(", "super().open(")
# How often a module opens files itself, and why it may.
OTHERS = {
    # of the kernel
    "collectives.hardware": 1,
    "launch.spare": 1,
    "parameter_server.watch": 1,
    "runtime.end.process_end": 1,
    "runtime.lock_lending": 1,
    "runtime.report.stacks": 1,
    "runtime.report.work": 3,
    # of the user: programs, data, and what callbacks write
    "data.array_files": 2,
    "data.arrow_rows": 1,
    "data.record_files": 2,
    "launch.warm": 1,
    "strategies.startup": 1,
    "training.configured": 1,
    # in folders that only this user can enter
    "cluster.local": 1,
    "ray.actor": 3,
    "ray.task": 3,
    "runtime.folders.uploads": 1,
    "runtime.report.progress": 4,
    "training.recording": 2,
    "verify.arms": 5,
    "verify.settings": 2,
    # between a file that its caller has created and a URL or a path of the caller
    "runtime.folders.storage": 1,
    # folders, and files that it creates and whose owner it checks
    "cluster.resolvers.shared_folder": 1,
    "collectives.shared_memory_rendezvous": 2,
    "runtime.folders.temporary": 2,
}


def test_only_one_module_opens_files_that_other_users_may_replace():
    found = collections.Counter()
    for module, path in MODULES.items():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func)
            first = ast.unparse(node.args[0]) if node.args else ""
            is_method = ast.unparse(node).startswith(METHODS)
            if function.rpartition(".")[2] in OPENS and not first.startswith(CHECKED) and not is_method:
                found[module.removeprefix("tfdist.")] += 1
    del found["runtime.files"]
    assert found == OTHERS, "use open_regular, open_own, read_file or write_file of tfdist.runtime.files instead"
