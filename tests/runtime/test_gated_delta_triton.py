# SPDX-License-Identifier: Apache-2.0
"""The Triton form of the gated delta rule, in Triton's interpreter on the CPU.

Whether Triton interprets is decided when it is first imported, which other tests' libraries may
have done long ago: all cases run in one child process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from freetoken_runtime.kernels.gated_delta import cpu, dispatch, reference

SHAPES = [(1, 3, 12, 20), (2, 2, 7, 5), (1, 1, 16, 40)]  # Hk, Hv, Dk, Dv
LENGTHS = [1, 2, 31, 32, 33, 65]
STRENGTHS = [0.0, 1e4]
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Results = dict[str, tuple[torch.Tensor, torch.Tensor, Case]]

# Memory that torch hands out uninitialised is NaN under deterministic algorithms.
RUNNER = """
import sys, torch
from freetoken_runtime.kernels.gated_delta import triton as kernel
torch.use_deterministic_algorithms(True)
assert torch.empty(7).isnan().all()
results = {}
for name, (form, sizes, case) in torch.load(sys.argv[1]).items():
    state, outs = case[5], []
    for part in range(len(sizes)):
        rows = [torch.split(x, sizes)[part] for x in case[:5]]
        out, state = getattr(kernel, form)(*rows, state)
        outs.append(out)
    results[name] = torch.cat(outs), state, case
torch.save(results, sys.argv[2])
"""


# At the shapes of a layer of Qwen3.6-35B-A3B and of a small odd one: heads, repeat, Dk, Dv.
COMPILER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from freetoken_runtime.kernels.gated_delta import triton as kernel
for heads, repeat, key_dim, dim in ((32, 2, 128, 128), (6, 3, 12, 20)):
    sizes = dict(heads=heads, repeat=repeat, key_dim=key_dim, dim=dim, size=kernel.CHUNK, strip=32)
    sizes["keys"] = kernel._block(key_dim)
    for function in (kernel._step, kernel._chunk_maps, kernel._apply):
        names = [parameter.name for parameter in function.params]
        kinds = {n: "*fp32" for n in names} | {"count": "i32"} | dict.fromkeys(sizes, "constexpr")
        kinds = {n: kinds[n] for n in names}
        known = {(i,): sizes[n] for i, n in enumerate(names) if n in sizes}
        source = ASTSource(fn=function, signature=kinds, constexprs=known)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(function.__name__, len(compiled.asm["cubin"]))
"""


def draw(rows: int, shape: tuple[int, int, int, int], seed: int = 0) -> Case:
    """Arguments whose memory goes on with NaN behind the last row of each."""
    key_heads, heads, key_dim, dim = shape
    generator = torch.Generator().manual_seed(seed)

    def within_nan(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, torch.full_like(x, float("nan"))))[: len(x)]

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    q = functional.normalize(normal(rows, key_heads, key_dim), dim=-1) * key_dim**-0.5
    k = functional.normalize(normal(rows, key_heads, key_dim), dim=-1)
    decay = -0.1 * functional.softplus(normal(rows, heads) + 1)
    v, beta = normal(rows, heads, dim), normal(rows, heads).sigmoid()
    state = normal(heads, key_dim, dim)
    q, k, v, decay, beta, state = (within_nan(x) for x in (q, k, v, decay, beta, state))
    return q, k, v, decay, beta, state


def strong(strength: float) -> Case:
    q, k, v, decay, beta, state = draw(40, SHAPES[1], seed=2)
    return q, k, v, torch.full_like(decay, -strength), beta, state


def cases() -> dict[str, tuple[str, list[int], Case]]:
    """Name -> the form to call, how the rows are cut, arguments."""
    table = {
        f"{rows} {shape}": ("scan", [rows], draw(rows, shape))
        for rows in LENGTHS
        for shape in SHAPES
    }
    table["one as a chunk"] = ("chunked", [1], draw(1, SHAPES[0]))
    table["cut"] = ("scan", [1, 33, 16], draw(50, SHAPES[0], seed=1))
    return table | {f"{x} strong": ("scan", [40], strong(x)) for x in STRENGTHS}


def run_with_triton(script: str, *arguments: Path, **environment: str) -> str:
    """What a process of its own prints."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (extra 'gpu')")
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the kernels gave for every case, and the arguments after it."""
    folder: Path = tmp_path_factory.mktemp("triton")
    torch.save(cases(), folder / "cases")
    run_with_triton(RUNNER, folder / "cases", folder / "results", TRITON_INTERPRET="1")
    loaded: Results = torch.load(folder / "results")
    return loaded


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a part of the largest expected value."""
    assert ours.shape == expected.shape and bool(ours.isfinite().all())
    return float((ours - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", LENGTHS)
def test_equals_the_reference(
    results: Results, rows: int, shape: tuple[int, int, int, int]
) -> None:
    """Oracle: the reference in fp64, from a state that is carried in. Arguments are as before."""
    case = draw(rows, shape)
    expected, last = reference.scan(*case[:5], case[5].double())
    out, after, arguments = results[f"{rows} {shape}"]
    assert error(out, expected) < 1e-6 and error(after, last) < 1e-6
    assert all(torch.equal(x, y) for x, y in zip(arguments, case, strict=True))


def test_one_row_as_a_chunk_equals_the_step(results: Results) -> None:
    """Oracle: the step, which shares no code with chunks."""
    out, after, _ = results["one as a chunk"]
    expected, last, _ = results[f"1 {SHAPES[0]}"]
    assert error(out, expected) < 1e-6 and error(after, last) < 1e-6


def test_equals_the_form_for_cpus_across_cuts(results: Results) -> None:
    """Oracle: the chunked form for CPUs over all rows at once."""
    expected, last = cpu.scan(*draw(50, SHAPES[0], seed=1))
    out, after, _ = results["cut"]
    assert error(out, expected) < 1e-6 and error(after, last) < 1e-6


@pytest.mark.parametrize("strength", STRENGTHS)
def test_decays_of_any_strength(results: Results, strength: float) -> None:
    """Oracle: the reference in fp64."""
    case = strong(strength)
    expected, last = reference.scan(*case[:5], case[5].double())
    out, after, _ = results[f"{strength} strong"]
    assert error(out, expected) < 2e-6 and error(after, last) < 2e-6


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """Oracle: Triton's compiler down to machine code of sm_90; nothing is run."""
    printed = run_with_triton(COMPILER, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    sizes = [int(line.split()[1]) for line in printed.splitlines()]
    assert len(sizes) == 6 and min(sizes) > 0


def test_a_cpu_never_meets_triton() -> None:
    """Oracle: the modules of a process that imports the engine; the dispatcher gives bit for bit
    what the form for CPUs gives."""
    case = draw(5, SHAPES[0])
    for ours, expected in zip(dispatch.scan(*case), cpu.scan(*case), strict=True):
        assert torch.equal(ours, expected)
    script = (
        "import sys, freetoken_runtime.engine, freetoken_runtime.kernels.gated_delta.dispatch\n"
        "print([name for name in sys.modules if name.startswith('freetoken_runtime.kernels')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "gated_delta.dispatch" in done.stdout and "gated_delta.triton" not in done.stdout
