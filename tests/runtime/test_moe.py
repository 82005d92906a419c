# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts against transformers' own blocks, and a row's independence of all others."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch.utils import deterministic

from freetoken_runtime.batch import Form, RowGroup
from freetoken_runtime.errors import UnsupportedConfig
from freetoken_runtime.kernels.dense_linear.cpu import linear
from freetoken_runtime.kernels.experts import reference
from freetoken_runtime.kernels.experts.cpu import Demand, Task, group_by_expert, mix
from freetoken_runtime.kernels.int4_linear import cpu as int4
from freetoken_runtime.kernels.int4_linear import reference as int4_reference
from freetoken_runtime.kernels.int8_linear import cpu as int8
from freetoken_runtime.kernels.int8_linear import reference as int8_reference
from freetoken_runtime.kernels.integers import (
    quantise_int4,
    quantise_int8,
    stack_int4,
    stack_int8,
)
from freetoken_runtime.layers.linear import PARTS, DenseLinear, IntegerLinear, Linear
from freetoken_runtime.layers.moe import Moe, build
from freetoken_runtime.layers.norm import RmsNorm
from freetoken_runtime.layers.rows import Rows
from freetoken_runtime.specs.mlp import MlpSpec
from freetoken_runtime.specs.moe import (
    ClampedGlu,
    ExpertGroups,
    ExpertSpec,
    LatentSpec,
    MoeSpec,
    RouterSpec,
)

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ["float32", "bfloat16", "int8", "int4"]
CASES = [
    (kind, form)
    for kind in KINDS
    for form in Form
    if kind != "int4" or form not in (Form.MANY_INT8, Form.MANY_INT16)
]
Weights = dict[str, torch.Tensor]


@dataclass
class TensorParts:
    """`layers.parts.Parts` from plain tensors; remembers what was taken."""

    weights: Mapping[str, torch.Tensor]
    kind: str
    prefix: str
    taken: list[str]

    def tensor(self, name: str) -> torch.Tensor:
        self.taken.append(self.prefix + name)
        return self.weights[self.prefix + name]

    def linear(self, *names: str) -> Linear:
        matrices = [self.tensor(name) for name in names]
        bias = None
        if self.has(f"{names[0]}.bias"):
            bias = torch.cat([self.tensor(f"{name}.bias") for name in names])
        if self.kind == "int8":
            values = stack_int8([quantise_int8(matrix) for matrix in matrices])
            return IntegerLinear(int8.pack(values), bias)
        if self.kind == "int4":
            groups = stack_int4([quantise_int4(matrix, 32) for matrix in matrices])
            return IntegerLinear(int4.pack(groups), bias)
        return DenseLinear(torch.cat(matrices).to(getattr(torch, self.kind)), bias)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.weights

    def experts(self, spec: MoeSpec) -> None:
        return None

    def within(self, part: str) -> "TensorParts":
        return TensorParts(self.weights, self.kind, f"{self.prefix}{part}.", self.taken)

    def norm(self, name: str, *, offset: float | None = None, eps: float | None = None) -> RmsNorm:
        raise NotImplementedError


def random_weights(spec: MoeSpec, hidden: int, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3
        for name, shape in spec.parameter_shapes(hidden).items()
    }


def make(spec: MoeSpec, weights: Mapping[str, torch.Tensor], kind: str = "float32") -> Moe:
    parts = TensorParts(weights, kind, "", [])
    moe = build(spec, parts)
    assert sorted(parts.taken) == sorted(weights), "every parameter is taken exactly once"
    return moe


def held(name: str, weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The weight as a kind of linear layer holds it, fp64."""
    if weight.dim() == 1 or "router" in name or kind == "float32":
        return weight.double()
    if kind == "int8":
        return int8_reference.dequantise(quantise_int8(weight))
    if kind == "int4":
        return int4_reference.dequantise(quantise_int4(weight, 32))
    return weight.bfloat16().double()


def naive(spec: MoeSpec, weights: Weights, x: torch.Tensor, kind: str = "float32") -> torch.Tensor:
    """The whole layer in fp64, a row and an expert at a time."""
    w = {name: held(name, weight, kind) for name, weight in weights.items()}
    none = torch.zeros((), dtype=torch.float64)

    def project(name: str, row: torch.Tensor) -> torch.Tensor:
        return row @ w[name].t() + w.get(f"{name}.bias", none)

    def feed(prefix: str, activation: object, row: torch.Tensor) -> torch.Tensor:
        up = project(f"{prefix}.up", row)
        if activation == "relu_squared":
            return project(f"{prefix}.down", up.clamp(min=0) ** 2)
        gate = project(f"{prefix}.gate", row)
        if isinstance(activation, ClampedGlu):
            return project(f"{prefix}.down", reference.clamped_glu(gate, up, activation))
        return project(f"{prefix}.down", gate * gate.sigmoid() * up)

    rows = x.double()
    correction = w["router.correction"].tolist() if spec.router.correction else None
    routes = [
        reference.route(project("router", row).tolist(), spec.router, correction) for row in rows
    ]
    inner = rows if spec.latent is None else project("latent_down", rows)
    out = reference.mix(
        inner, routes, lambda e, row: feed(f"experts.{e}", spec.expert.activation, row)
    )
    if spec.latent is not None:
        out = project("latent_up", out)
    if spec.shared is not None:
        shared = torch.stack([feed("shared", "silu", row) for row in rows])
        out += shared * project("shared_router", rows).sigmoid() if spec.shared_gate else shared
    return out


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a part of the expected range."""
    assert ours.shape == expected.shape and bool(ours.isfinite().all())
    return float((ours - expected).abs().max() / (expected.max() - expected.min()))


def forms(kind: str) -> list[Form]:
    """Those that weights of this kind have, each way of rounding activations included."""
    return [form for held, form in CASES if held == kind]


def all_rows(x: torch.Tensor, form: Form) -> list[RowGroup]:
    return [RowGroup(0, len(x), form)]


SIGMOID = RouterSpec(
    12,
    2,
    "sigmoid",
    normalise=True,
    correction=True,
    groups=ExpertGroups(3, 2, "sum_of_two_largest"),
    sum_added=1e-20,
    scale=1.7,
)
SPECS = {
    "softmax": MoeSpec(RouterSpec(12, 2, "softmax", True), ExpertSpec(36)),
    "gated shared": MoeSpec(
        RouterSpec(12, 3, "softmax"), ExpertSpec(36), MlpSpec(44), shared_gate=True
    ),
    "sigmoid in groups, shared": MoeSpec(SIGMOID, ExpertSpec(36), MlpSpec(44)),
    "clamped, biases": MoeSpec(
        RouterSpec(12, 2, "softmax_of_chosen", bias=True),
        ExpertSpec(36, ClampedGlu(1.702, 0.8), bias=True),
    ),
    "latent, relu²": MoeSpec(
        SIGMOID, ExpertSpec(36, "relu_squared"), latent=LatentSpec(28, bias=True)
    ),
}
HIDDEN = 60


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> MoeSpec:
    return SPECS[request.param]


@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_equal_the_reference(spec: MoeSpec, kind: str) -> None:
    """Oracle: fp64 over the held weights, a row at a time: 1e-5 where activations stay fp32, 2e-2
    where they are rounded to bf16, 4e-2 where to int8, 4e-4 where to two parts of it. The router is
    fp32 in every kind."""
    weights = random_weights(spec, HIDDEN)
    moe = make(spec, weights, kind)
    x = torch.randn(50, HIDDEN)
    expected = naive(spec, weights, x, kind)
    for form in forms(kind):
        exact = kind == "float32" or (kind.startswith("int") and form is Form.MANY)
        rounded = 2e-2
        if kind == "int8" and form in PARTS:
            rounded = 4e-2 / 128 ** (PARTS[form] - 1)
        exact = exact or (kind == "int8" and form is Form.MANY_ROUNDED)  # not a form of its own
        ours = moe(x, all_rows(x, form)).double()
        assert error(ours, expected) < (1e-5 if exact else rounded)


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_a_row_does_not_depend_on_its_neighbours(spec: MoeSpec, kind: str, form: Form) -> None:
    """Oracle: the row's group alone, bit for bit, beside 0 to 80 rows of other sequences."""
    moe = make(spec, random_weights(spec, HIDDEN), kind)
    x = torch.randn(100, HIDDEN)
    whole = moe(x, all_rows(x, form))
    spans = ((0, 1), (5, 7), (20, 29)) if form is Form.FEW else ((0, 16), (5, 22), (20, 100))
    for start, stop in spans:
        alone = moe(x[start:stop], all_rows(x[start:stop], form))
        assert torch.equal(alone, whole[start:stop])


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_computed_each_in_its_form(spec: MoeSpec, kind: str) -> None:
    """Oracle: the groups one by one, bit for bit, however few rows of the batch are cut."""
    moe = make(spec, random_weights(spec, HIDDEN), kind)
    x = torch.randn(60, HIDDEN)
    groups = [
        RowGroup(0, 20, Form.MANY),
        RowGroup(20, 50, Form.MANY),
        RowGroup(50, 51, Form.FEW),
        RowGroup(51, 60, Form.FEW),
    ]
    expected = [moe(x[g.start : g.stop], all_rows(x[g.start : g.stop], g.form)) for g in groups]
    assert torch.equal(moe(x, groups), torch.cat(expected))


def test_where_a_kernel_depends_on_the_number_of_rows_they_are_padded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: a GEMM that changes its bits below 16 rows; the mixture must not show it. (The
    shared expert is the decoder's to keep apart: it is in `linears`.)"""
    from freetoken_runtime.layers import linear as module

    def fickle(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x, weight, bias) * (1.0 + 2**-18 * max(0, 16 - len(x)))

    monkeypatch.setattr(module, "is_row_invariant", lambda *shape: False)
    monkeypatch.setattr(module, "linear", fickle)
    monkeypatch.setattr(module, "linear_from_two", fickle)
    spec = SPECS["softmax"]
    moe = make(spec, random_weights(spec, HIDDEN))
    x = torch.randn(30, HIDDEN)
    whole = moe(x, all_rows(x, Form.FEW))
    assert moe.linears == ()
    for row in range(30):
        assert torch.equal(moe(x[row : row + 1], all_rows(x[:1], Form.FEW))[0], whole[row])


@pytest.mark.parametrize("kind", KINDS)
def test_m12_experts_without_rows_are_not_computed(kind: str) -> None:
    """Oracle: the same layer with every expert's weights whole. A correction sends all rows to
    experts 3 and 7; the others hold NaN."""
    spec = MoeSpec(replace(SIGMOID, groups=None), ExpertSpec(36))
    weights = random_weights(spec, HIDDEN)
    weights["router.correction"] = torch.zeros(12)
    weights["router.correction"][[3, 7]] = 5.0
    x = torch.randn(40, HIDDEN)
    moe = make(spec, weights, kind)
    expected = {form: moe(x, all_rows(x, form)) for form in forms(kind)}
    for name in weights:
        if name.startswith("experts") and not name.startswith(("experts.3.", "experts.7.")):
            weights[name] = torch.full_like(weights[name], torch.nan)
    poisoned = make(spec, weights, kind)
    for form in forms(kind):
        assert torch.equal(poisoned(x, all_rows(x, form)), expected[form])


@pytest.mark.parametrize("kind", KINDS)
def test_m13_a_row_of_zeros_is_finite(spec: MoeSpec, kind: str) -> None:
    """Oracle: finite, and without biases zero; neighbours keep their bits."""
    moe = make(spec, random_weights(spec, HIDDEN), kind)
    x = torch.randn(30, HIDDEN)
    for form in forms(kind):
        expected = moe(x, all_rows(x, form))
        zeroed = x.clone()
        zeroed[11] = 0.0
        ours = moe(zeroed, all_rows(x, form))
        assert bool(ours.isfinite().all())
        assert torch.equal(ours[:11], expected[:11]) and torch.equal(ours[12:], expected[12:])
        if not spec.expert.bias and spec.latent is None:
            assert not ours[11].any()


@pytest.mark.parametrize("kind", KINDS)
def test_m15_poison_does_not_leak(spec: MoeSpec, kind: str) -> None:
    """Oracle: the same rows with clean memory. Every fresh tensor starts as NaN, and the rows of
    another sequence are NaN altogether."""
    moe = make(spec, random_weights(spec, HIDDEN), kind)
    x = torch.randn(45, HIDDEN)
    clean = {form: moe(x, all_rows(x, form)) for form in forms(kind)}
    x[:16] = torch.nan
    assert deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(8).isnan().all()), "fresh memory is poisoned"
        for form in forms(kind):
            ours = moe(x, all_rows(x, form))
            assert torch.equal(ours[16:], clean[form][16:])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("inner", [30, 60], ids=["H = 2I", "H = I"])
def test_m8_gate_and_up_are_told_apart_where_dimensions_are_equal(inner: int) -> None:
    """Oracle: the reference, for shapes in which a transposed or swapped matrix would fit."""
    for activation in ("silu", ClampedGlu(1.702, 0.8)):
        spec = MoeSpec(RouterSpec(12, 2, "softmax"), ExpertSpec(inner, activation))
        weights = random_weights(spec, HIDDEN)
        x = torch.randn(20, HIDDEN)
        ours = make(spec, weights)(x, all_rows(x, Form.MANY))
        assert error(ours.double(), naive(spec, weights, x)) < 1e-5


@pytest.mark.parametrize("rows", [1, 9])
def test_results_are_summed_in_the_order_of_the_slots(rows: int) -> None:
    """Oracle: the sum written out, bit for bit, in an order that differs from the experts'."""
    x = torch.randn(rows, 5)
    chosen = torch.stack([torch.randperm(7)[:4] for _ in range(rows)])
    chosen[0] = torch.tensor([2, 5, 0, 3])  # neither ascending nor, as they are served, descending
    weights = torch.rand(rows, 4)
    calls: list[int] = []
    released: list[int] = []

    def compute(expert: int, numbers: torch.Tensor | None, part: int) -> torch.Tensor:
        calls.append(expert)
        assert (numbers is None) == (rows == 1)
        return (x if numbers is None else x[numbers]) * (expert + 1.37)

    def serve(wanted: Sequence[Demand]) -> Generator[Task]:
        for demand in reversed(wanted):
            release = partial(released.append, demand.expert)
            yield Task(demand.expert, partial(compute, demand.expert), release)

    ours = mix(5, chosen, weights, serve, [rows])
    for row in range(rows):
        total = x[row] * (int(chosen[row, 0]) + 1.37) * weights[row, 0]
        for slot in range(1, 4):
            value = x[row] * (int(chosen[row, slot]) + 1.37)
            total = torch.addcmul(total, value, weights[row, slot])
        assert torch.equal(ours[row], total)
    assert calls[::-1] == sorted(set(chosen.flatten().tolist())), "each expert once"
    assert released == calls


def test_rows_are_grouped_by_expert() -> None:
    """Oracle: a dictionary built pair by pair."""
    chosen = torch.randint(0, 9, (40, 3))
    expected: dict[int, list[int]] = {}
    for pair, expert in enumerate(chosen.flatten().tolist()):
        expected.setdefault(expert, []).append(pair)
    ours = {expert: pairs.tolist() for expert, pairs in group_by_expert(chosen).items()}
    assert ours == expected and list(ours) == sorted(ours)


def test_what_a_kernel_rounds_is_rounded_once_for_all_experts() -> None:
    """Oracle: torch's own rounding of the rows that were picked; the same memory each time."""
    x = torch.randn(6, 32)
    rows, numbers = Rows(x), torch.tensor([4, 1])
    whole = rows.pick(None).rounded(torch.bfloat16)
    assert torch.equal(whole, x.bfloat16())
    assert rows.pick(None).rounded(torch.bfloat16) is whole
    assert torch.equal(rows.pick(numbers).rounded(torch.bfloat16), x[numbers].bfloat16())
    assert rows.pick(None).plain() is x and torch.equal(rows.pick(numbers).plain(), x[numbers])


def test_an_observer_sees_the_margins_of_every_row() -> None:
    """Oracle: the margins of the logits computed here; nothing is called once it is unset."""
    spec = SPECS["softmax"]
    weights = random_weights(spec, HIDDEN)
    moe = make(spec, weights)
    seen: list[torch.Tensor] = []
    moe.observer = seen.append
    x = torch.randn(30, HIDDEN)
    groups = [RowGroup(0, 20, Form.MANY), RowGroup(20, 30, Form.FEW)]
    moe(x, groups)
    moe.observer = None
    moe(x, groups)
    best = (x @ weights["router"].t()).topk(3, -1).values
    (margins,) = seen
    torch.testing.assert_close(margins, best[:, 1] - best[:, 2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_counted(kind: str) -> None:
    """Oracle: the linear layers of each matrix by itself; the router stays fp32."""
    spec = SPECS["gated shared"]
    weights = random_weights(spec, HIDDEN)
    parts = TensorParts(weights, kind, "", [])
    router = 4 * (12 + 1) * HIDDEN
    names = [(f"{at}.gate", f"{at}.up") for at in ("shared", *(f"experts.{e}" for e in range(12)))]
    downs = [(gate.replace("gate", "down"),) for gate, _ in names]
    matrices = sum(parts.linear(*stack).size_bytes for stack in (*names, *downs))
    assert make(spec, weights, kind).size_bytes == router + matrices


def test_a_gate_without_shared_experts_is_refused() -> None:
    """Oracle: the error's type."""
    router = RouterSpec(12, 2, "softmax")
    with pytest.raises(UnsupportedConfig):
        MoeSpec(router, ExpertSpec(36), shared_gate=True)
    with pytest.raises(UnsupportedConfig):
        MoeSpec(replace(router, bias=True), ExpertSpec(36), MlpSpec(44), shared_gate=True)
