"""ptxas, where there is one: what it says of a PTX text."""

import functools
import shutil
import subprocess
import tempfile


@functools.cache
def version():
    """(major, minor) of the ptxas on PATH, or None."""
    path = shutil.which("ptxas")
    if path is None:
        return None
    text = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout
    return tuple(int(part) for part in text.split("release ")[1].split(",")[0].split("."))


def complaint(text, target):
    """What ptxas says against the text for that target: "" when it takes it."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        command = ["ptxas", f"-arch={target}", "-O0", "-o", "/dev/null", file.name]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        return "" if result.returncode == 0 else result.stderr + result.stdout
