"""`python -m tfdist.doctor` is `tfdist doctor`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("tfdist.commands.doctor", run_name="__main__", alter_sys=True)
