"""Puts an installation of quern into the wheel, as quern/tree: the folder that QUERN_TREE names (scripts/wheel.sh). Without
it the wheel has the tools alone, for any machine."""

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class TreeHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if tree := os.environ.get("QUERN_TREE"):
            build_data["force_include"][tree] = "quern/tree"
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"  # no code of a Python version: ctypes calls the library
