"""The process that touches the GPU. It runs the items whose names come on standard input, one a line, and says of each
that it begins and what came of it, as JSON on standard output. After an item that did not pass it ends: what follows
starts with a clean chip, in another process."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np

from . import items, probes, variants
from .device import Device, DeviceError, KernelError

REPEATS = 20  # of a probe that may be right by luck
SECONDS = 45  # for an item: less than the parent waits


class Channel:
    """Standard output for what is said to the parent; whatever else is printed goes to standard error."""

    def __init__(self):
        self.file = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, **what):
        print(json.dumps(what), file=self.file, flush=True)


def run_probe(device, probe: probes.Probe) -> dict:
    for _ in range(REPEATS if probe.races else 1):
        out = device.run(probe)
        if probe.faults:
            return {"result": "fail", "detail": "no error came of it", "got": "no error", "expected": "an error"}
        wrong = probes.wrong(probe, out)
        if wrong.size:
            return {"result": "fail", **excerpt(probe, out, wrong)}
    return {"result": "pass"}


def excerpt(probe: probes.Probe, out: np.ndarray, wrong: np.ndarray, most: int = 8) -> dict:
    """What is wrong, in few words of many."""
    expected = probe.expected.ravel()
    places = [
        {name: int(i) for name, i in zip(probe.axes, np.unravel_index(at, probe.expected.shape), strict=True)}
        for at in wrong[:most]
    ]
    return {
        "detail": f"{wrong.size} of {out.size} words are wrong, the first at "
        + ", ".join(f"{name} {i}" for name, i in places[0].items()),
        "at": places,
        "got": [f"{out[at]:08x}" for at in wrong[:most]],
        "expected": [f"{expected[at]:08x}" for at in wrong[:most]],
    }


def run_call(device, call: variants.Call) -> dict:
    found = variants.check(device, call)
    wrong = found.pop("wrong")
    return {"result": "pass", **found} if wrong is None else {"result": "fail", "detail": wrong, **found}


def run(device, item: items.Item) -> dict:
    """result ("pass", "fail", "error") and more."""
    try:
        return run_probe(device, item.probe) if item.probe else run_call(device, item.call)
    except DeviceError as error:
        asked = item.probe and item.probe.faults and isinstance(error, KernelError)
        # A wait for what never comes is not the fault.
        result = "pass" if asked and not len(device.stuck_waits()) else "error"
        return {"result": result, "detail": str(error)}
    except Exception as error:  # of verify itself: the next item may still run
        return {"result": "error", "detail": f"{type(error).__name__}: {error}"}


def stuck(waits: np.ndarray, root: Path, source: str) -> list[dict]:
    """The waits that did not end, each with the function of csrc/<source> that it is in."""
    return [
        {
            "barrier": wait["barrier"].decode(errors="replace"),
            "where": f"csrc/{source}:{wait['line']}, {function_at(root, source, int(wait['line']))}",
            "block": int(wait["block"]),
            "warp": int(wait["thread"]) // 32,
            "thread": int(wait["thread"]),
            "parity": int(wait["parity"]),
        }
        for wait in waits
    ]


def function_at(root: Path, source: str, line: int) -> str:
    """The last function that begins at or before a line of csrc/<source>."""
    name = ""
    for text in (root / "csrc" / source).read_text().splitlines()[:line]:
        begins = re.match(r"(?:template <.*> )?(?:FA4_DEVICE|FA4_PROBE\(\w+\)) .*?(\w+)\(", text)
        name = begins[1] if begins else name
    return name


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--units", nargs="*", default=[])
    options = parser.parse_args()
    say = Channel().say
    try:
        device = Device(options.library, options.units)
    except (DeviceError, OSError) as error:
        say(cannot=str(error))
        return
    say(device=device.about)
    known = {item.name: item for item in items.all_items(options.source, device.capability, device.multiprocessors)}
    sources = items.sources(options.source, device.capability)
    for line in sys.stdin:
        item = known[line.strip()]
        kernel = item.probe.kernel if item.probe else variants.kernel_of(device, item.call)
        say(begins=item.name, kernel=kernel)

        def waits(kernel=kernel):
            return stuck(device.stuck_waits(), options.source, sources[kernel])

        def late(name=item.name, waits=waits):
            detail = f"no answer in {SECONDS} seconds: the kernel hangs where no wait is bounded"
            say(ends=name, result="hang", detail=detail, seconds=SECONDS, stuck=waits())
            os._exit(1)

        watch = threading.Timer(SECONDS, late)
        watch.start()
        started = time.monotonic()
        found = run(device, item)
        watch.cancel()
        found["seconds"] = round(time.monotonic() - started, 3)
        if found["result"] != "pass":
            found["stuck"] = waits()
        say(ends=item.name, **found)
        if found["result"] != "pass" or (item.probe and item.probe.faults):
            return


if __name__ == "__main__":
    main()
