"""Notes with each line of the package that runs which test ran it, for `make tiers`: in pytest's processes, and in those that tests start."""

import os
import sys


def switch(nodeid: str) -> None:
    """Attributes to a test the lines that this process runs from now on."""
    if "coverage" in sys.modules:
        running = sys.modules["coverage"].Coverage.current()
        if running:
            running.switch_context(nodeid)


def switch_as_environment_says() -> None:
    """Attributes to the test that has started this process the lines that it runs from now on."""
    switch(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])
