"""`quern` where pip installed it: replaces itself by the program, bin/quern of the installation."""

import os
import sys
from pathlib import Path

from quern.base.installation import installed_file


def main() -> int:
    program = installed_file("bin/quern")
    if program is None:
        print("quern: error: this installation has the Python tools alone; install a wheel of quern that has the program, or "
              "set QUERN_PREFIX to an installation", file=sys.stderr)
        return 4
    os.environ.setdefault("QUERN_TOOLS", str(Path(sys.argv[0]).resolve().with_name("quern-tools")))  # of this environment
    os.execv(program, [str(program), *sys.argv[1:]])
