#!/usr/bin/env python3
"""Makes bare 16-bit token files of text files: a token is a byte, so the vocabulary is 256.

    bytes.py FILE... -o FOLDER      writes FOLDER/train.bin and FOLDER/val.bin, the last tenth

Enough to try a plugin with. Real runs tokenize: quern-tools tokenize.
"""

import argparse
from array import array
from pathlib import Path
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--out", required=True, type=Path)
    arguments = parser.parse_args()
    tokens = array("H", list(b"".join(path.read_bytes() for path in arguments.files)))
    if sys.byteorder == "big":
        tokens.byteswap()
    if len(tokens) < 2000:
        parser.error(f"found {len(tokens)} bytes of text, expected at least 2000")
    arguments.out.mkdir(parents=True, exist_ok=True)
    cut = len(tokens) * 9 // 10
    (arguments.out / "train.bin").write_bytes(tokens[:cut].tobytes())
    (arguments.out / "val.bin").write_bytes(tokens[cut:].tobytes())
    print(f"{arguments.out}: {cut} tokens to train on, {len(tokens) - cut} to evaluate on")


if __name__ == "__main__":
    main()
