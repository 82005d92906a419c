# SPDX-License-Identifier: Apache-2.0
"""Everything that only a device can show, in one run: `python tests/device/run.py --out DIR`.

Each block is a process of its own with a time limit of its own, and writes DIR/<block>.json: what
it found, what failed, and its error if it broke. The others run all the same; all together take at
most eight minutes. `--interpret` runs them, with tiny sizes and in one process, in Triton's
interpreter on a CPU: figures of time mean nothing then.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITS_S = {
    "links": 40,
    "kernels": 80,
    "large": 50,
    "mixtures": 90,
    "double_buffer": 60,
    "elastic": 45,
    "placement": 60,
    "graphs": 50,
}
TOTAL_S = 480
INTERPRETED_S = 240
INTERPRETED_ONLY = ("order",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("blocks", nargs="*", default=[])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    known = [*LIMITS_S, *(INTERPRETED_ONLY if args.interpret else ())]
    blocks = args.blocks or known
    unknown = set(blocks) - set(known)
    if unknown:
        parser.error(f"no such block: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if args.interpret:
        _run(blocks, args.out, INTERPRETED_S, interpret=True)
    else:
        end_s = time.monotonic() + TOTAL_S
        for block in blocks:
            limit_s = min(float(LIMITS_S[block]), end_s - time.monotonic())
            if limit_s > 0:
                _run([block], args.out, limit_s, interpret=False)
    return _summary(blocks, args.out)


def _run(blocks: list[str], out: Path, limit_s: float, *, interpret: bool) -> None:
    """A process that runs these blocks. Its end, however it came, is in their files."""
    for block in blocks:
        (out / f"{block}.json").unlink(missing_ok=True)
    paths = [ROOT, ROOT / "runtime", ROOT / "storage", os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
        "TRITON_INTERPRET": "1" if interpret else "0",
    }
    mode = ["--interpret"] if interpret else []
    command = [sys.executable, "-m", "tests.device.block", "--out", str(out), *mode, *blocks]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=limit_s, capture_output=True, text=True
        )
        error = f"ended with {done.returncode}: {done.stderr[-4000:]}"
    except subprocess.TimeoutExpired:
        error = f"not done within {limit_s:.0f} s"
    for block in blocks:
        file = out / f"{block}.json"
        if not file.exists():
            file.write_text(json.dumps({"block": block, "ok": False, "error": error}, indent=1))


def _summary(blocks: list[str], out: Path) -> int:
    """One line per block; 1 if one of them is not as it should be."""
    failed = 0
    for block in blocks:
        file = out / f"{block}.json"
        found = json.loads(file.read_text()) if file.exists() else {"error": "no time was left"}
        failed += not found.get("ok")
        why = found.get("error") or "; ".join(found.get("failures", []))
        line = "ok" if found.get("ok") else f"FAILED {why.strip().splitlines()[-1] if why else ''}"
        sys.stdout.write(f"{block:14} {found.get('seconds', 0):6.1f} s  {line}\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
