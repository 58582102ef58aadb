"""Where this machine has a Chromium that starts; ``python -m tests.browser.chromium`` prints it, or fails.

Knows: the names and folders browsers are installed under. Must not know: what is tested with them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
MAC_APPS = ("Chromium", "Google Chrome", "Microsoft Edge")
WHAT_TO_INSTALL = (
    "no Chromium or Chrome that starts was found; install one (Debian: sudo apt-get install chromium, macOS: "
    "brew install --cask chromium), or name one with CHROME=/path/to/chrome, and run the tests again"
)


class NoChromiumError(RuntimeError):
    """The browser tests cannot run; the message says what to install."""


def find_chromium() -> str:
    """Return the path of the first browser that reports its version.

    It is started for that, as a name may be a stub with nothing behind it (Ubuntu's ``chromium-browser``
    without snap). ``CHROME`` in the environment is tried alone. Raises NoChromiumError.
    """
    for path in _candidates():
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0:
            return path
    raise NoChromiumError(f"{WHAT_TO_INSTALL}.")


def _candidates() -> Iterator[str]:
    if wish := os.environ.get("CHROME"):
        yield shutil.which(wish) or wish
        return
    for name in NAMES:
        if path := shutil.which(name):
            yield path
    for app in MAC_APPS:
        for folder in (Path("/Applications"), Path.home() / "Applications"):
            program = folder / f"{app}.app" / "Contents" / "MacOS" / app
            if program.exists():
                yield str(program)


if __name__ == "__main__":
    try:
        print(find_chromium())
    except NoChromiumError as error:
        sys.exit(f"tests/run: {error}")
