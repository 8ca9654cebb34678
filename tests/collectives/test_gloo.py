"""Who cannot use gloo is told why; this needs no PyTorch. The sums are compared in tests/multiprocess/test_gloo.py."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.multiprocess import harness
from tfdist.collectives import gloo

LACKS = "PyTorch, which has gloo, is not installed: pip install 'tfdist[gloo]'"


def test_without_pytorch_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gloo.why_not(0, ["127.0.0.1:1"] * 2) == LACKS


def test_a_pytorch_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libgomp.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "cannot be imported: OSError: libgomp.so.1: cannot open" in gloo.why_not(0, ["127.0.0.1:1"] * 2)


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is not installed: make test-torch")
def test_a_network_that_is_not_there_is_named():
    program = "from tfdist.collectives import gloo; print(gloo.why_not(0, ['127.0.0.1:1'] * 2))"
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "nonet7", "PYTHONPATH": str(harness.ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=100)
    assert "gloo finds no network (of GLOO_SOCKET_IFNAME=nonet7) to listen on" in done.stdout, done.stdout + done.stderr


@pytest.mark.full
def test_all_workers_are_told_what_to_install(tmp_path):
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import tfdist; tfdist.Trainer('multi_worker_mirrored', transport='gloo')"
    )
    command = [sys.executable, "-m", "tfdist.launch", "--workers=2", f"--log_dir={tmp_path}", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(harness.ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    for rank in range(2):
        said = (tmp_path / f"worker-{rank}.log").read_text()
        assert f"strategy.transport=gloo is not possible: {LACKS}. Use strategy.transport=grpc." in said, said
