"""Everything that verify runs, in order: the probes, then the forward's calls."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from . import build
from .probes import SECTIONS, Probe, probes
from .variants import Call, calls

FORWARD = "the forward, with every wait bounded, is as near to float64 as PyTorch's own arithmetic"


@dataclasses.dataclass(frozen=True)
class Item:
    name: str
    probe: Probe | None = None
    call: Call | None = None

    def describe(self) -> dict:
        """What the report says of it whatever comes of it."""
        if self.call:
            return {"name": self.name, "kind": "forward", "assumes": FORWARD}
        p = self.probe
        return {
            "name": self.name,
            "kind": "probe",
            "line": p.section,
            "about": SECTIONS[p.section],
            "part": p.part,
            "assumes": p.assumes,
            "used_by": p.used_by,
            "kernel": p.kernel,
        }


def sources(root: Path, capability: int) -> dict[str, str]:
    """The file below csrc of every kernel of the library."""
    listed = build.entries(root, "verify/kernels.def")
    asked = {name: file for name, archs, file, _ in listed if any(build.fits(arch, capability) for arch in archs)}
    return asked | build.kernels(root, capability)


def all_items(root: Path, capability: int, multiprocessors: int) -> list[Item]:
    asked = [Item(f"probe_{p.name}", probe=p) for p in probes(multiprocessors, capability)]
    # What ends in an error comes last of the probes: each takes its process with it.
    asked.sort(key=lambda item: item.probe.faults)
    return asked + [Item(f"forward_{c.name}", call=c) for c in calls(root, capability)]
