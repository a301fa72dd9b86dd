"""Types of arguments that the command lines of the package and of benchmarks/ share, for argparse."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from pathlib import Path


def count(text: str) -> int:
    """A whole number from 1 on, of 32 bits."""
    if not text.isdecimal() or not 1 <= int(text[:11]) < 1 << 31:
        raise ArgumentTypeError(f"it must be a whole number from 1 to {(1 << 31) - 1}, and it is {text!r}")
    return int(text)


def duration(text: str) -> float:
    """Seconds: a finite number from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ArgumentTypeError(f"it must be a number from 0 on, and it is {text!r}")
    return number


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # a name that is too long
        raise ArgumentTypeError(f"{path}: {error.strerror}") from None


def new_files(text: str) -> str:
    """What the names of files to write begin with, in a folder that is there."""
    if not _is_folder(Path(text).parent):
        raise ArgumentTypeError(f"{text}: there is no folder {Path(text).parent}")
    return text


def new_file(text: str) -> str:
    """The name of a file to write, in a folder that is there."""
    if text == "-":
        raise ArgumentTypeError(f"{text}: it is no file")
    if _is_folder(Path(text)):
        raise ArgumentTypeError(f"{text}: it is a folder")
    return new_files(text)


def new_file_or_stdout(text: str) -> str:
    """The same, or - for standard output."""
    return text if text == "-" else new_file(text)
