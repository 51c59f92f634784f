"""Training language models from Python, and the tools of `quern-tools`.

    config = quern.Config.load("run.toml").set("train.steps", 100)
    with quern.Run(config) as run:
        for step in run:
            print(step.step, step.loss)

`help(quern.Run)`, `help(quern.Config)` and docs/python.md have the rest.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"  # quern's own
__all__ = ["Config", "DataLoss", "Error", "Finding", "Run", "Step", "Tensor", "Text", "WandbLog", "launch",
           "prefix"]

if TYPE_CHECKING:
    from quern.base.installation import prefix as prefix
    from quern.driver.config import Config as Config
    from quern.driver.error import Error as Error, Finding as Finding
    from quern.driver.ranks import launch as launch
    from quern.runs.export_wandb import WandbLog as WandbLog
    from quern.driver.run import DataLoss as DataLoss, Run as Run, Step as Step, Tensor as Tensor, Text as Text

_MODULES = {"Config": "driver.config", "Error": "driver.error", "Finding": "driver.error", "WandbLog": "runs.export_wandb", "launch": "driver.ranks",
            "prefix": "base.installation"}


def __getattr__(name: str) -> object:  # at first use: most tools need neither the library nor numpy
    if name not in __all__:
        raise AttributeError(f"module 'quern' has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(f"quern.{_MODULES.get(name, 'driver.run')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
