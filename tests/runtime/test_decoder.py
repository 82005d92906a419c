# SPDX-License-Identifier: Apache-2.0
"""The decoder against transformers, in every way rows can be cut into passes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken_agent.catalog import ModelNotFound, resolve
from freetoken_runtime.batch import Form
from freetoken_runtime.kernels.dense_linear.cpu import linear_from_two
from freetoken_runtime.models.decoder import Decoder
from freetoken_runtime.specs.attention import AttentionSpec
from freetoken_runtime.state.buffers import Pool, RowShape, StateLayout
from freetoken_runtime.state.sequence import Sequence as Spans
from freetoken_runtime.state.spaces import Spaces
from freetoken_runtime.testing import ListState, batch_of, build_checkpoint
from freetoken_runtime.weights import load

pytestmark = pytest.mark.usefixtures("one_thread")  # tiny matrices: a team only costs

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama wide heads": ("llama", {"head_dim": 20, "num_key_value_heads": 6}),
    "llama linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 20}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3 tied, biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}
LENGTH = 300


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A folder and the transformers model in it."""
    name, settings = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family")
    return folder, build_checkpoint(folder, name, **settings)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build_checkpoint(folder, "llama")
    return folder


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 211, (count,), generator=torch.manual_seed(seed)).tolist()


def spans(decoder: Decoder) -> Spans:
    """The engine's own state, NaN wherever nothing was written."""
    shapes = []
    for layer in decoder.spec.layers:
        mixer = layer.mixer
        assert isinstance(mixer, AttentionSpec)
        shapes.append(RowShape(mixer.num_kv_heads, mixer.head_dim, mixer.head_dim, torch.float32))
    return Spans(Spaces(Pool(StateLayout(shapes), poison=True)))


def form_of(decoder: Decoder, rows: int) -> Form:
    return Form.FEW if rows < decoder.few_rows else Form.MANY


def run(decoder: Decoder, parts: Sequence[tuple[Any, list[int]]]) -> list[torch.Tensor]:
    """One pass over new ids of several sequences -> each sequence's logits, all its rows."""
    parts = sorted(parts, key=lambda part: form_of(decoder, len(part[1])) is Form.FEW)
    for state, ids in parts:
        if isinstance(state, Spans):
            state.begin(len(ids))
    forms = [form_of(decoder, len(ids)) for _, ids in parts]
    total = sum(len(ids) for _, ids in parts)
    batch = batch_of(parts, forms, share_few=decoder.few_rows_batch)
    hidden = decoder.forward(batch, torch.arange(total))
    for state, ids in parts:
        state.commit(ids)
    return list(torch.split(decoder.logits(hidden), [len(ids) for _, ids in parts]))


def in_chunks(decoder: Decoder, state: Any, ids: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits of all rows, passes of `sizes` rows, the last size repeated."""
    outs, at = [], 0
    while at < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        outs += run(decoder, [(state, ids[at : at + size])])
        at += size
    return torch.cat(outs)


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a part of the range of the expected logits."""
    assert ours.shape == expected.shape and bool(ours.isfinite().all())
    return float((ours - expected).abs().max() / (expected.max() - expected.min()))


def reference(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize(
    "sizes", [[LENGTH], [1], [7], [64], [257], [63, 1, 1, 65, 1]], ids=lambda sizes: str(sizes[0])
)
def test_logits_equal_transformers(family: tuple[Path, Any], sizes: list[int]) -> None:
    """Oracle: transformers in one pass, 1e-4 of the range (seen: 2e-6): prefill, chunks of 1, 7,
    64 and 257, and decode after prefill."""
    folder, model = family
    decoder = load(folder).decoder
    ids = random_ids(LENGTH)
    ours = in_chunks(decoder, spans(decoder), ids, list(sizes))
    assert relative(ours, reference(model, ids)) < 1e-4


def test_a_batch_of_unequal_lengths_equals_transformers(family: tuple[Path, Any]) -> None:
    """Oracle: transformers on each sequence by itself: prefill chunks and decode steps of several
    sequences in one pass."""
    folder, model = family
    decoder = load(folder).decoder
    paths = [random_ids(count, seed) for seed, count in enumerate((37, 100, 129, 1, 16))]
    states = [spans(decoder) for _ in paths]
    done = [0] * len(paths)
    outs: list[list[torch.Tensor]] = [[] for _ in paths]
    for sizes in ((20, 100, 1, 1, 3), (1, 0, 64, 0, 13), (16, 0, 63, 0, 0), (0, 0, 1, 0, 0)):
        active = [index for index, size in enumerate(sizes) if size]
        active.sort(key=lambda index: form_of(decoder, sizes[index]) is Form.FEW)
        parts = [(states[i], paths[i][done[i] : done[i] + sizes[i]]) for i in active]
        for index, logits in zip(active, run(decoder, parts), strict=True):
            outs[index].append(logits)
            done[index] += sizes[index]
    assert done == [37, 100, 129, 1, 16]
    for path, parts_of_path in zip(paths, outs, strict=True):
        assert relative(torch.cat(parts_of_path), reference(model, path)) < 1e-4


@pytest.mark.parametrize("length", [63, 64, 65])
def test_m22_prefill_equals_prefill_and_a_step(family: tuple[Path, Any], length: int) -> None:
    """Oracle: the same decoder in one pass; same greedy token, 1e-4 of the range."""
    decoder = load(family[0]).decoder
    ids = random_ids(length, 5)
    whole = in_chunks(decoder, ListState(4), ids, [length])[-1]
    stepped = in_chunks(decoder, ListState(4), ids, [length - 1, 1])[-1]
    assert relative(stepped, whole) < 1e-4
    assert int(stepped.argmax()) == int(whole.argmax())


FORMS: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16"},
    {"quant": "int8"},
    {"quant": "int4"},
]


@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_a_neighbour_changes_no_bit(llama: Path, forms: dict[str, Any]) -> None:
    """Oracle: the sequence alone, bit for bit, through prefill and decode beside neighbours that
    come and go and share its row groups."""
    decoder = load(llama, **forms).decoder
    ids = random_ids(100)
    plan = [70, 1, 1, 20, 1, 1, 6]

    def play(neighbours: bool) -> torch.Tensor:
        state, at, outs = spans(decoder), 0, []
        others = [spans(decoder) for _ in range(3)]
        for step, size in enumerate(plan):
            parts: list[tuple[Any, list[int]]] = [(state, ids[at : at + size])]
            if neighbours:
                extra = [(other, random_ids(1 + 40 * (step % 2), step)) for other in others]
                parts = extra[: step % 4] + parts + extra[step % 4 :]
            ordered = sorted(parts, key=lambda p: form_of(decoder, len(p[1])) is Form.FEW)
            results = run(decoder, parts)
            outs.append(results[[part[0] for part in ordered].index(state)])
            at += size
        return torch.cat(outs)

    assert torch.equal(play(True), play(False))


@pytest.mark.parametrize("forms", FORMS[1:], ids=str)
def test_forms_agree_teacher_forced(llama: Path, forms: dict[str, Any]) -> None:
    """Oracle: the same weights in one prefill. Steps and chunks differ from it by activation
    rounding only: mean 1e-2, max 6e-2 of the range, mean KL 3e-3 (DESIGN, invariant 1)."""
    decoder = load(llama, **forms).decoder
    ids = random_ids(256, 3)
    whole = in_chunks(decoder, spans(decoder), ids, [256])
    for sizes in ([1], [33, 7]):
        steps = in_chunks(decoder, spans(decoder), ids, sizes)
        extent = whole.max() - whole.min()
        difference = (steps - whole).abs() / extent
        kl = torch.nn.functional.kl_div(
            steps.log_softmax(-1), whole.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        assert float(difference.mean()) < 1e-2 and float(difference.max()) < 6e-2
        assert float(kl) < 3e-3


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_integer_decoders_equal_an_fp32_decoder_of_their_values(
    llama: Path, quant: Any, tmp_path: Path
) -> None:
    """Oracle: transformers with the dequantised weights, in one prefill (fp32 activations)."""
    from freetoken_runtime.kernels.int4_linear import reference as four
    from freetoken_runtime.kernels.int8_linear import reference as eight
    from freetoken_runtime.kernels.integers import quantise_int4, quantise_int8

    model = build_checkpoint(tmp_path, "llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or "embed" in name:
                continue
            if quant == "int4" and "lm_head" not in name:
                parameter.copy_(four.dequantise(quantise_int4(parameter, 32)))
            else:
                parameter.copy_(eight.dequantise(quantise_int8(parameter)))
    ids = random_ids(100)
    decoder = load(llama, quant=quant).decoder
    hidden = decoder.forward(batch_of([(ListState(4), ids)], [Form.MANY]), torch.arange(100))
    ours = decoder.logits(hidden, Form.MANY)
    assert relative(ours, reference(model, ids)) < 1e-5


def test_only_the_rows_asked_for_come_back(llama: Path) -> None:
    """Oracle: all rows; none asked gives none, and the state is written all the same."""
    decoder = load(llama).decoder
    ids = random_ids(40)
    everything = decoder.forward(batch_of([(ListState(4), ids)], [Form.MANY]), torch.arange(40))
    some = decoder.forward(batch_of([(ListState(4), ids)], [Form.MANY]), torch.tensor([39, 3]))
    assert torch.equal(some, everything[[39, 3]])
    state = ListState(4)
    none = decoder.forward(
        batch_of([(state, ids)], [Form.MANY]), torch.tensor([], dtype=torch.long)
    )
    state.commit(ids)
    assert none.shape == (0, 60) and state.length == 40
    assert [len(k) for k, _ in state.pieces(3, new=False)] == [40]


@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_logits_of_a_row_do_not_depend_on_the_others(llama: Path, forms: dict[str, Any]) -> None:
    """Oracle: each row by itself, bit for bit: an anchor's stored row answers like a batch."""
    decoder = load(llama, **forms).decoder
    rows = torch.randn(9, 60)
    whole = decoder.logits(rows)
    assert whole.dtype == torch.float32
    for index in range(9):
        assert torch.equal(decoder.logits(rows[index : index + 1])[0], whole[index])
    assert relative(decoder.logits(rows, Form.MANY), whole) < (1e-6 if not forms else 2e-2)


def test_where_rows_cannot_batch_they_are_computed_one_by_one(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a GEMM whose rows depend on their number: the decoder must ask for groups of one
    sequence, and its head must still answer each row as if alone."""
    from freetoken_runtime.layers import linear as module

    def fickle(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear_from_two(x, weight, bias) * (1.0 + 2**-20 * len(x))

    monkeypatch.setattr(module, "is_row_invariant", lambda *shape: False)
    monkeypatch.setattr(module, "linear_from_two", fickle)
    decoder = load(llama).decoder
    assert not decoder.few_rows_batch
    rows = torch.randn(5, 60)
    alone = torch.cat([decoder.logits(row) for row in torch.split(rows, 1)])
    assert torch.equal(decoder.logits(rows), alone)


@pytest.mark.smollm2
@pytest.mark.parametrize("forms", [{}, {"quant": "int4"}], ids=str)
def test_the_bits_of_smollm2_do_not_depend_on_the_number_of_threads(forms: dict[str, Any]) -> None:
    """Oracle: one thread against two, through prefill over a span, steps and a short chunk."""
    try:
        decoder = load(resolve("smollm2"), **forms).decoder
    except ModelNotFound:
        pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")
    ids = random_ids(100, 1)
    outs = []
    for count in (1, 2):
        torch.set_num_threads(count)
        outs.append(in_chunks(decoder, spans(decoder), ids, [70, 1, 1, 18, 10]))
    assert torch.equal(*outs)
