"""Install one requirements file with pip, showing one line of progress instead of pip's hundreds.

usage: python requirements/install.py FILE [pip options]

Everything that pip says goes to `pip.log` in the environment; its end is printed when pip fails.
Standard library only: it runs in an environment that has nothing else yet.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

LOG_LINES_ON_FAILURE = 40

# pip's words for "this requirement is being handled", whichever place it comes from.
_STARTED = re.compile(r"^(?:Collecting|Processing|Requirement already satisfied:)\s+(\S+)")
_DOWNLOAD = re.compile(r"^\s+Downloading\s+(?:\S*/)?([^-/\s]+)-\S+\s+\((.+?)\)")


def pins(requirements: Path) -> int:
    """How many requirements the file names."""
    lines = requirements.read_text(encoding="utf-8").splitlines()
    return sum(1 for line in lines if line.strip() and not line.startswith(("#", "-")))


def bar(done: int, total: int, doing: str) -> str:
    """One line of at most 79 columns: a bar of 24 cells, the count, and what is going on."""
    filled = min(24, 24 * done // total) if total else 0
    return f"  [{'#' * filled}{'.' * (24 - filled)}] {min(done, total):3}/{total} {doing}"[:79].ljust(79)


def main(argv: list[str]) -> int:
    if not argv:
        print(__doc__, file=sys.stderr)
        return 2
    requirements, options = Path(argv[0]), argv[1:]
    total, started, live = pins(requirements), time.monotonic(), sys.stdout.isatty()
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", "--no-input"]
    command += ["--disable-pip-version-check", *options, "-r", str(requirements)]
    print(f"{requirements.name}: {total} package{'s' if total != 1 else ''}", flush=True)
    log = Path(sys.prefix, "pip.log")
    done, said = 0, []
    with (
        log.open("a", encoding="utf-8") as kept,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            kept.write(line)
            said.append(line)
            doing = None
            if match := _STARTED.match(line):
                done += 1
                doing = Path(match[1]).name
            elif match := _DOWNLOAD.match(line):
                doing = f"{match[1]} ({match[2]})"
            elif line.startswith("Installing collected packages"):
                done, doing = total, "writing files"
            if live and doing:
                print("\r" + bar(done, total, doing), end="", flush=True)
    seconds = time.monotonic() - started
    if live:
        print("\r" + " " * 79 + "\r", end="")
    if pip.returncode:
        print("".join(said[-LOG_LINES_ON_FAILURE:]), file=sys.stderr)
        print(f"error: pip could not install {requirements}; all it said is in {log}", file=sys.stderr)
    else:
        print(f"  done in {seconds:.0f} s", flush=True)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
