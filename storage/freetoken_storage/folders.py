# SPDX-License-Identifier: Apache-2.0
"""What a folder needs beside its files."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
