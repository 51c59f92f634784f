"""The quern that this package belongs to: a wheel's, an installation's or a checkout's."""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def installed_file(name: str) -> Path | None:
    """The file `name`, such as "bin/quern", below $QUERN_PREFIX if that is set; else of the wheel (in its folder `tree`), of
    the installation or of the checkout's release build. None: it is not there."""
    if prefix := os.environ.get("QUERN_PREFIX"):
        prefixes = [Path(prefix)]
    else:
        prefixes = [PACKAGE / "tree"]
        for folder in PACKAGE.parents:
            for marker, place in (("lib/quern/python", "."), ("frontends/python", "build/release")):
                if (folder / marker).is_dir():
                    prefixes.append(folder / place)
    return next((prefix / name for prefix in prefixes if (prefix / name).is_file()), None)
