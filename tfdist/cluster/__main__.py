"""`python -m tfdist.cluster` is `tfdist cluster`."""

import runpy

runpy.run_module("tfdist.commands.cluster", run_name="__main__", alter_sys=True)
