"""Packages of Debian: fetched, not installed, and unpacked."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

from quern.base.fault import Fault


def run(command: list[str], folder: Path | None, next_step: str) -> None:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        raise Fault(" ".join(command), "failed", " ".join(result.stderr.split()), advice=next_step)


def download(packages: Iterable[str], folder: Path) -> None:
    """Puts the package files into the folder."""
    run(["apt-get", "download", *packages], folder, "as root, run apt-get update, and try again")


def unpack(package: Path, folder: Path, next_step: str) -> None:
    run(["dpkg-deb", "-x", str(package.resolve()), str(folder)], None, next_step)
