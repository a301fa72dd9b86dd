"""python -m ptxsim FILE.ptx ...: kernels, their parameters, shared memory and registers, and unknown instructions."""

import argparse
import pathlib
import sys

import ptxsim


def describe(path):
    """Prints one file; True when the simulator can run it."""
    print(path)
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        print(f"  {error.strerror}")
        return False
    lines = ptxsim.unknown(text)
    for line in lines:
        print(f"  {line}")
    if lines:
        return False
    try:
        module = ptxsim.Module(text)
    except ValueError as error:
        print(f"  {error}")
        return False
    for name, entry in module.entries.items():
        print(f"  {name}: {entry['registers']} PTX registers, {entry['shared']} bytes of static shared memory")
        for i, (size, alignment) in enumerate(entry["params"]):
            print(f"    parameter {i}: {size} bytes, aligned to {alignment}")
    return True


def main():
    parser = argparse.ArgumentParser(prog="python -m ptxsim", description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE.ptx")
    results = [describe(path) for path in parser.parse_args().files]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
