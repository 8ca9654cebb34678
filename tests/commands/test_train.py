"""`tfdist train` in this process: what it refuses before it trains. Its training runs are in tests/end_to_end/test_train.py."""

import pytest

from tfdist.commands import train


@pytest.mark.parametrize("where", ["{0}/file", "{0}/file/below", "/proc/nowhere", "{0}/" + "x" * 300])
def test_a_work_directory_that_cannot_be_written_to_is_said(tmp_path, capsys, where):
    (tmp_path / "file").write_text("")
    assert train.main(["train", "--config=digits", f"--workdir={where.format(tmp_path)}"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("tfdist: workdir must be a folder that can be written to. Received: ") and said.count("\n") == 1
    )
