"""quern.launch: the ranks of a run on this machine, each this script once more."""

import ctypes
import json
import os
import sys
import traceback
from types import TracebackType

from quern.driver.config import Config
from quern.driver.error import Error
from quern.driver.library import check, library


def launch(config: Config | str | os.PathLike[str]) -> None:
    """Starts this script again as each of the config's ranks (parallel.ranks), waits for them, and ends with their exit
    code; in a rank it returns at once. Call it before anything that only ranks are to do:

        config = quern.Config.load("run.toml")
        quern.launch(config)
        with quern.Run(config) as run:
            for step in run: ...

    Only rank 0's standard output is seen. Signals, failures and parallel.restarts are as with `quern train`. It returns
    at once, too, where the run has one rank, and under torchrun, mpirun or srun, which started the ranks.
    """
    config = config if isinstance(config, Config) else Config.load(config)
    code = ctypes.c_int()
    words = json.dumps([sys.executable, *sys.orig_argv[1:]] if can_start_again() else [])
    sys.stdout.flush()
    check(library().quern_start_ranks(config.as_json(), words.encode(), ctypes.byref(code)))
    if code.value >= 0:
        raise SystemExit(code.value)
    if "QUERN_STARTER" in os.environ:
        sys.excepthook = end_rank


def can_start_again() -> bool:
    """Code that is typed in, or read from standard input, cannot be read a second time."""
    from_input = getattr(sys.modules["__main__"], "__file__", None) == "<stdin>"
    return not (from_input or hasattr(sys, "ps1") or "ipykernel" in sys.modules)


def end_rank(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What a rank fails of, as the starter reads it."""
    if isinstance(error, Error):
        print(f"quern: error: {error}", file=sys.stderr)
        raise SystemExit(error.code)
    traceback.print_exception(kind, error, trace)
    last = "".join(traceback.format_exception_only(kind, error)).strip().splitlines()[-1]
    print(f"quern: error: {last}", file=sys.stderr)
    raise SystemExit(1)
