"""Lists the presets, configurations that come with the package. No TensorFlow here.

    tfdist presets   # the same: python -m tfdist.commands.presets

`tfdist train --config=NAME` trains a preset; `tfdist train --config=NAME --help` shows its fields.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags

from tfdist.config import command_line
from tfdist.config.presets import PRESETS
from tfdist.errors import ConfigError
from tfdist.runtime.end import process_end


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, or 2 for an invalid command line."""
    values = command_line.new_flags()
    try:
        words = command_line.read_flags(values, argv)[1:]
        if words:
            raise ConfigError(f"Usage: tfdist presets, without further words. Received: {' '.join(words)}")
    except (ConfigError, flags.Error) as e:
        print(e, file=sys.stderr)
        return 2
    if values.help:
        print(f"{__doc__}\n{command_line.help_text(values)}")
        return 0
    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        print(f"{name:<{width}}  {preset.about}")
    return 0


if __name__ == "__main__":
    sys.exit(process_end.run_command(main, sys.argv))
