"""Types of arguments that the command lines of the package and of benchmarks/ share, for argparse."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from pathlib import Path


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"it must be a whole number from 1 on, and it is {text!r}")
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


def new_file(text: str) -> str:
    """The name of a file to write, in a folder that is there; - may stand for standard output."""
    path = Path(text)
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if path.is_dir():
        raise ArgumentTypeError(f"{text}: it is a folder")
    return text
