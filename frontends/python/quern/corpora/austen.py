"""Jane Austen's six novels as plain text, from Debian's package r-cran-janeaustenr, without R.

    quern-tools corpus austen data/austen/text

The package is downloaded (not installed) and holds an R lazy-load database: data/Rdata.rdx maps names
to places in data/Rdata.rdb, each of which is one R object, serialised. A novel is a character
vector of its lines, which become one .txt file. A folder with all six is not touched.
"""

import tempfile
import zlib
from argparse import ArgumentParser, Namespace
from pathlib import Path

from quern.base.arguments import path_argument
from quern.base.fault import writing
from quern.base.files import replace_file
from quern.corpora.debian_packages import download, unpack
from quern.corpora.r_objects import DataError, read_package

PACKAGE = "r-cran-janeaustenr"
NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")


def extract_novels(package: Path | None, out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if package is None:
            download([PACKAGE], folder)
            package = next(folder.glob("*.deb"))
        unpack(package, folder / "unpacked", f"name another {PACKAGE} with --deb")
        novels = read_package(folder / "unpacked")
    if missing := sorted(set(NOVELS) - novels.keys()):
        raise DataError(f"{package.name}: no {', '.join(missing)} among {sorted(novels)}")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    for name, lines in sorted(novels.items()):
        if not (isinstance(lines, list) and all(isinstance(line, str) for line in lines)):
            raise DataError(f"{package.name}: {name} is not a character vector")
        path = out / f"{name}.txt"
        replace_file(path, "".join(line + "\n" for line in lines).encode())
        print(f"{path}: {len(lines):,} lines, {path.stat().st_size:,} bytes")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("out", type=path_argument, help="folder for one .txt a novel")
    parser.add_argument("--deb", type=path_argument, help=f"a {PACKAGE} package file, instead of downloading it")


def main(options: Namespace) -> None:
    if all((options.out / f"{name}.txt").is_file() for name in NOVELS):
        print(f"{options.out}: has all {len(NOVELS)} novels")
        return
    try:
        extract_novels(options.deb, options.out)
    except (ValueError, zlib.error) as error:
        raise DataError(error) from None
