"""python -m flash_attn4 verify: what our kernels assume of a chip, asked of the chip that is there.

Compiles, from the source tree, a kernel for each assumption and the forward's kernels with every wait bounded, runs
them, and writes a JSON report that names the assumption that failed. Exit status: 0 when all is as assumed, 1 when
something is not, 2 when nothing could be run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import flash_attn4
from flash_attn4.arguments import new_file

from . import build, items
from .build import Missing
from .device import compute_capability
from .probes import NOT_PROBED, SECTIONS

SECONDS_TO_START = 120  # of a worker
SECONDS_FOR_ONE = 60  # item, its float64 reference included
LISTED = 103  # what --list is of where no GPU is: it is asked most
GIVE_UP = 25  # items that did not pass: the chip is not the one that was meant


class Report:
    """The JSON document, on disk after every change."""

    def __init__(self, path: Path):
        self.path = path
        self.document = {
            "format": 1,
            "flash_attn4": flash_attn4.__version__,
            "torch": torch.__version__,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "nvcc": None,
            "device": None,
            "finished": False,
            "passed": False,
            "missing": None,
            "failed": [],
            "not_probed": [{"line": n, "about": SECTIONS[n], "why": why} for n, why in NOT_PROBED.items()],
            "items": [],
        }

    def add(self, found: dict):
        self.document["items"].append(found)
        if found["result"] != "pass":
            keep = ("name", "line", "part", "assumes", "used_by", "kernel", "result", "detail")
            self.document["failed"].append({k: found[k] for k in keep if found.get(k) is not None})
        self.write()

    def write(self, **more):
        self.document.update(more)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(self.document, indent=1) + "\n")
        partial.replace(self.path)


class Worker:
    """A process that runs items; its lines arrive in a queue, None when it has ended."""

    def __init__(self, command: list[str], names: list[str]):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()
        try:
            self.process.stdin.write("".join(f"{name}\n" for name in names))
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already; what it said comes through the queue

    def read(self):
        for line in self.process.stdout:
            self.lines.put(json.loads(line))
        self.lines.put(None)

    def next(self, seconds: float):
        """What it says next; None when it has ended; queue.Empty when it takes longer."""
        return self.lines.get(timeout=max(seconds, 0.1))

    def end(self) -> str:
        """Ends it, and returns the last of what it printed as errors."""
        self.process.kill()
        self.process.wait()
        self.errors.seek(0)
        return self.errors.read()[-2000:].strip()


def run_some(command, waiting: list[items.Item], deadline: float, done) -> dict | None:
    """Runs items in one process until one does not pass, and takes those that ran off the list. done(item, found) for
    each. Returns what the process said of the device, None when it did not get that far."""
    worker = Worker(command, [item.name for item in waiting])
    about, begun, kernel, last = None, False, None, None
    try:
        while waiting:
            limit = SECONDS_FOR_ONE if about else SECONDS_TO_START
            try:
                said = worker.next(min(limit, deadline - time.monotonic()))
            except queue.Empty:
                said = {"late": True}
            if said and "device" in said:
                about = said["device"]
            elif said and "begins" in said:
                begun, kernel = True, said["kernel"]
            elif said and "ends" in said:
                found = {key: value for key, value in said.items() if key != "ends"}
                last = waiting.pop(0)
                done(last, {"kernel": kernel, **found})
                begun = False
            else:
                if said and "cannot" in said:
                    raise Missing(f"the GPU cannot be used: {said['cannot']}")
                late = said is not None
                words = worker.end()
                if begun or (about and not last):  # it hung, or took its process with it
                    detail = "no answer in time: the kernel hangs" if late else "the process ended"
                    found = {"result": "hang" if late else "error", "detail": f"{detail}. {words}".strip()}
                    done(waiting.pop(0), {"kernel": kernel, **found})
                elif not about and time.monotonic() < deadline:
                    raise Missing(f"the process that runs kernels does not start: {words or 'no answer'}")
                break
    finally:
        worker.end()
    return about


def run_all(report: Report, command, waiting: list[items.Item], deadline: float, tell):
    def done(item, found):
        found = {**item.describe(), **found}
        report.add(found)
        tell(found)

    while waiting and time.monotonic() < deadline and len(report.document["failed"]) < GIVE_UP:
        about = run_some(command, waiting, deadline, done)
        if about and not report.document["device"]:
            report.write(device=about)
    why = "too many others did not pass" if time.monotonic() < deadline else "no time was left"
    for item in waiting:
        done(item, {"result": "not run", "detail": why})


def unreached(report: Report, kernels: set[str]):
    """The forward's kernels that no call has run."""
    reached = {
        found["kernel"] for found in report.document["items"] if found["kind"] == "forward" and "kernel" in found
    }
    for name in sorted(kernels - reached):
        yield {
            "name": f"reached_{name}",
            "kind": "forward",
            "assumes": "every kernel of the library is run by some call",
            "kernel": name,
            "result": "fail",
            "detail": "no call of this list takes it",
        }


def line_of(found: dict) -> str:
    state = {"pass": "PASS", "not run": "----"}.get(found["result"], "FAIL")
    words = found["assumes"] if found["kind"] == "probe" else found.get("kernel") or found["assumes"]
    text = f"{state}  {found['name']:<34} {words}"
    if state == "FAIL":
        text += f"\n      {found['result']}: {found.get('detail', '')}"
        if found.get("used_by"):
            text += f"\n      depends on it: {found['used_by']}"
        for wait in found.get("stuck", [])[:8]:
            text += f"\n      waits: {wait['where']}, warp {wait['warp']} of block {wait['block']}: {wait['barrier']}"
    return text


def summary(document: dict) -> str:
    ran = [found for found in document["items"] if found["result"] != "not run"]
    passed = sum(found["result"] == "pass" for found in ran)
    lines = [f"\n{passed} of {len(document['items'])} passed"]
    if document["failed"]:
        lines.append("Assumptions that do not hold on this chip, or could not be shown:")
        lines += sorted(
            {f"  {f['assumes']}" + (f" [line {f['line']}]" if "line" in f else "") for f in document["failed"]}
        )
    lines += [f"Line {entry['line']}: {entry['why']}" for entry in document["not_probed"]]
    return "\n".join(lines)


def worker_command(root: Path, library: Path, capability: int) -> list[str]:
    """What starts a process that runs items on the GPU."""
    kernels = build.kernels(root, capability)
    files = {source for name, source in items.sources(root, capability).items() if name not in kernels}
    command = [sys.executable, "-m", "flash_attn4.verify.worker", "--library", str(library), "--source", str(root)]
    return [*command, "--units", *kernels, *sorted(build.probe_unit(source) for source in files)]


def chosen(every: list, only: list[str] | None) -> list:
    """Those whose name contains one of the texts; all without texts."""
    found = [item for item in every if not only or any(text in item.name for text in only)]
    if not found:
        raise Missing(f"no item's name contains {' or '.join(only)}; --list prints all")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_attn4 verify", description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=new_file, default="verify.json", help="the report (default: verify.json)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="items whose name contains it; may be repeated")
    parser.add_argument("--minutes", type=float, default=20, help="for all of it, compiling apart (default: 20)")
    parser.add_argument("--source", help="the source tree, where it is not the installed package's folder")
    parser.add_argument("--build", type=Path, help="where to compile (default: build/verify in the source tree)")
    parser.add_argument("--list", action="store_true", help="say what would be run (on B300, where no GPU is), and end")
    options = parser.parse_args(argv)
    if not 0 < options.minutes < math.inf:
        parser.error(f"argument --minutes: it must be a number above 0, and it is {options.minutes:g}")
    report = Report(Path(options.json).resolve())
    try:
        root = build.source_folder(options.source)
        if options.list:
            here = compute_capability()
            listed = items.all_items(root, here if here and build.kernels(root, here) else LISTED, 1)
            for item in chosen(listed, options.only):
                print(f"{item.name:<40} {item.describe()['assumes']}")
            return 0
        try:
            report.write()
        except OSError as error:
            parser.error(f"argument --json: {options.json}: it cannot be written: {error.strerror}")
        capability = compute_capability()
        if capability is None:
            raise Missing("no GPU: the CUDA driver (libcuda.so.1) is not there or finds no device")
        library = build.build(root, capability, options.build)
        report.write(nvcc=build.nvcc_version(root))
        waiting = chosen(items.all_items(root, capability, 1), options.only)
        deadline = time.monotonic() + 60 * options.minutes
        command = worker_command(root, library, capability)
        run_all(report, command, waiting, deadline, lambda found: print(line_of(found), flush=True))
        if not options.only:
            for found in unreached(report, build.best_kernels(root, capability)):
                report.add(found)
                print(line_of(found))
    except Missing as missing:
        if not options.list:
            report.write(missing=str(missing))
        print(f"flash_attn4 verify: {missing}", file=sys.stderr)
        return 2
    report.write(finished=True, passed=not report.document["failed"])
    print(summary(report.document))
    print(f"The report: {report.path}")
    return 0 if report.document["passed"] else 1
