# SPDX-License-Identifier: Apache-2.0
"""Experts on a device, without one: every block of `tests/device` in Triton's interpreter on the
CPU, in a process of its own, and every kernel through Triton's compilers.

The blocks name their oracles; this file says which of their findings must be there, so that none
can fall silent. Nothing here says anything of a GPU's results or speed.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests" / "device" / "run.py"
Found = dict[str, dict[str, Any]]

# Checks that a block must have made, by the begin of their names, and how many at least.
EXPECTED = {
    "links": {"4 records of int4 by kernel are whole": 1, "1 records of bfloat16 by copy": 2},
    "kernels": {
        **{
            f"{form} {activation} few: error": 1
            for form in ("float32", "bfloat16", "int8", "int4")
            for activation in ("silu", "gelu_tanh", "clamped_glu", "relu_squared")
        },
        "int4 silu many: error": 1,
        "arranged as the reference": 1,
        "int8 silu few: bits beside other rows": 1,
    },
    "large": {"same bits": 1},
    "mixtures": {"int4": 8, "model offloaded: same bits": 1, "model hybrid: error": 1},
    "double_buffer": {"int8 ahead: same bits": 1, "int8: each expert": 1},
    "elastic": {"bfloat16 budget": 3, "bfloat16 table": 3},
    "placement": {"int4: predicted": 1},
    "graphs": {"offloaded, 2 rows": 3, "resident, 2 rows": 3},
    "order": {"2 slots": 1, "7 slots": 1, "4 slots": 1, "without waiting": 2},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every block found."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (extra 'gpu')")
    out = tmp_path_factory.mktemp("device")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RUN), "--out", str(out), "--interpret"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    files = {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}
    assert files.keys() == EXPECTED.keys(), done.stdout + done.stderr
    return files


@pytest.mark.parametrize("block", EXPECTED)
def test_a_block_finds_what_it_should(found: Found, block: str) -> None:
    """Oracles: fp64 products of the same values for kernels, the experts with all of their slots
    for every other way of serving them, clocks for the order of streams; see the blocks."""
    result = found[block]
    assert result["error"] is None, result["error"]
    assert result["failures"] == [] and result["ok"]
    for begin, count in EXPECTED[block].items():
        assert sum(name.startswith(begin) for name in result["values"]) >= count, begin


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_without_a_device_each_block_says_so(tmp_path: Path) -> None:
    """Oracle: the files; a block that breaks leaves its error, and the others run."""
    command = [sys.executable, str(RUN), "--out", str(tmp_path), "links", "large"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.count("FAILED") == 2
    for block in ("links", "large"):
        result = json.loads((tmp_path / f"{block}.json").read_text())
        assert not result["ok"] and "there is no such device" in result["error"]


# Every kernel at the shapes of a layer of Qwen3-30B-A3B, and of an odd one with biases.
COMPILER = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from freetoken_runtime.device.host_records import record_of
from freetoken_runtime.experts.records import ExpertForm
from freetoken_runtime.kernels.expert_tiles import triton as arranging
from freetoken_runtime.kernels.experts import triton as experts
from freetoken_runtime.kernels.record_copy import triton as copying
from freetoken_runtime.specs.moe import ClampedGlu, ExpertSpec

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx942", 64)}
FLOAT = torch.float32
FORMS = [(None, torch.bfloat16), ("int8", FLOAT), ("int4", FLOAT), (None, FLOAT)]
KINDS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
ODD = ExpertSpec(84, ClampedGlu(1.7, 7.0), True)
SHAPES = {"usual": (2048, ExpertSpec(768), 8), "odd": (60, ODD, 3)}

def compiled(function, kinds, constants, target):
    names = [parameter.name for parameter in function.params]
    signature = {n: "constexpr" if n in constants else kinds[n] for n in names}
    known = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
    pointers = (i for i, n in enumerate(names) if signature[n][0] == "*")
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(fn=function, signature=signature, constexprs=known, attrs=aligned)
    return triton.compile(source, target=target).asm

target = TARGETS[sys.argv[1]]
assert not experts.INTERPRETED
cases = [(shape, *form) for shape in SHAPES for form in FORMS]
if sys.argv[2] == "some":
    cases = [("usual", *FORMS[0]), ("usual", *FORMS[2])]
for shape, quant, dtype in cases:
    hidden, spec, slots = SHAPES[shape]
    record = record_of(ExpertForm.of(spec, hidden, quant, dtype, 32))
    rows = KINDS[record.compute_dtype]
    kinds = dict(x=rows, inner=rows, order="*i64", tiles="*i32", addresses="*i64", out="*fp32")
    step = experts.inputs_per_step(record)
    for tile in (16, 64):
        first = {**experts.first_constants(record, tile, step), "slots": slots}
        first["width"] = record.down.inputs
        second = experts.matrix_constants(record, record.down, tile, step)
        for function, constants in ((experts._first, first), (experts._second, second)):
            asm = compiled(function, kinds, constants, target)
            code = asm.get("cubin") or asm["hsaco"]
            narrow = asm.get("ptx", "").count("ld.global.b8")
            print(shape, quant or dtype, tile, function.__name__, len(code), narrow)
constants = dict(slots=8, width=2048, block=256)
kinds = dict(out="*fp32", weights="*fp32", mixed="*fp32")
asm = compiled(experts._combine, kinds, constants, target)
print("usual - - _combine", len(asm.get("cubin") or asm["hsaco"]), 0)
constants = dict(experts=128, rows=16, block=128, room=256)
kinds = dict(chosen="*i64", addresses="*i64", order="*i64", tiles="*i32", pairs="i32", count="i32")
asm = compiled(arranging._arrange, kinds, constants, target)
print("usual - - _arrange", len(asm.get("cubin") or asm["hsaco"]), 0)
asm = compiled(copying._copy, dict(addresses="*i64", pairs="i32"), dict(block=1024), target)
print("usual - - _copy", len(asm.get("cubin") or asm["hsaco"]), 0)
"""


@pytest.mark.parametrize("target", ["cuda", "hip"])
@pytest.mark.parametrize(
    ("which", "cases"), [("some", 2), pytest.param("all", 8, marks=pytest.mark.slow)]
)
def test_kernels_compile_for_gpus_that_are_not_here(
    tmp_path: Path, target: str, which: str, cases: int
) -> None:
    """Oracle: Triton's compilers down to machine code, of sm_90 and of gfx942; nothing is run. At
    usual shapes weights are never loaded byte by byte (on sm_90, whose assembly says it)."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (extra 'gpu')")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILER, target, which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == cases * 2 * 2 + 3
    assert all(int(line[-2]) > 0 for line in lines)
    assert [line for line in lines if line[0] == "usual" and int(line[-1])] == []
