"""`python -m tfdist.doctor` is `tfdist doctor`."""

import runpy

runpy.run_module("tfdist.commands.doctor", run_name="__main__", alter_sys=True)
