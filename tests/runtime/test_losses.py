# SPDX-License-Identifier: Apache-2.0
"""What is lost when stored integers become others, summed up by hand."""

import pytest
import torch

from freetoken_runtime import losses as module
from freetoken_runtime.kernels.integers import int4_from_groups, quantise_int4, quantise_int8
from freetoken_runtime.losses import Losses
from freetoken_runtime.weight_source import Groups


def random_matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.manual_seed(seed))


def relative(exact: torch.Tensor, held: torch.Tensor) -> float:
    return float((exact.double() - held.double()).norm() / exact.double().norm())


def test_the_loss_of_int8_and_bfloat16_is_that_of_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: norms of the differences, over both matrices and of the worse one; nothing of a
    matrix that the file does not quantise."""
    monkeypatch.setattr(module, "_SLICE_ELEMENTS", 7 * 70)
    small, large = random_matrix(33, 70, 0), 1e3 * random_matrix(20, 70, 1)
    losses = Losses(lambda name: None if name == "plain" else "Q6_K")
    held = [losses.add(name, x, quantise_int8(x)) for name, x in (("a", small), ("b", large))]
    losses.add("plain", small, quantise_int8(small))
    losses.add("a", small, small.bfloat16())
    restored = [x.values * x.scales[:, None].float() for x in held]
    parts = [relative(x, y) for x, y in zip((small, large), restored, strict=True)]
    whole = relative(torch.cat((small, large)), torch.cat(restored))
    worse = max(zip(parts, "ab", strict=True))
    rounded = relative(small, small.bfloat16())
    assert losses.notes() == (
        f"Q6_K became bfloat16: {rounded:.2%} of the weights' norm lost, at most {rounded:.2%} (a)",
        f"Q6_K became int8: {whole:.2%} of the weights' norm lost, "
        f"at most {worse[0]:.2%} ({worse[1]})",
    )


def test_kept_integers_lose_what_rounding_their_scales_loses() -> None:
    """Oracle: the weights with scales and zeros rounded to bf16; none if they are bf16 already."""
    generator = torch.manual_seed(0)
    values = torch.randint(0, 16, (33, 96), generator=generator).to(torch.uint8)
    scales, minimums = torch.rand(33, 3) + 0.1, -torch.rand(33, 3)

    def notes(scales: torch.Tensor, minimums: torch.Tensor) -> tuple[str, ...]:
        losses = Losses(lambda name: "Q4_1")
        losses.add(
            "a",
            Groups(values, scales, minimums, 32),
            int4_from_groups(values, scales, minimums, 32),
        )
        return losses.notes()

    def wide(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(32, 1)

    zeros = (minimums + 8 * scales).bfloat16().float()
    exact = values * wide(scales) + wide(minimums)
    held = (values.float() - 8) * wide(scales.bfloat16().float()) + wide(zeros)
    lost = relative(exact, held)
    assert lost > 5e-4
    (note,) = notes(scales, minimums)
    assert note.startswith(f"Q4_1 became int4 in groups of 32: {lost:.2%} of")
    rounded = scales.bfloat16().float()
    (note,) = notes(rounded, -8 * rounded)
    assert note.startswith("Q4_1 became int4 in groups of 32: 0.00% of")


def test_columns_that_fill_groups_up_do_not_count() -> None:
    """Oracle: the norm of the difference over the model's own columns."""
    exact = random_matrix(10, 45, 2)
    losses = Losses(lambda name: "float8")
    held = losses.add("a", exact, quantise_int4(exact, 32))
    steps = (held.values.float() - 8).view(10, 2, 32)
    restored = steps * held.scales[..., None].float() + held.zeros[..., None].float()
    lost = relative(exact, restored.view(10, 64)[:, :45])
    assert losses.notes()[0].startswith(f"float8 became int4 in groups of 32: {lost:.2%} of")


def test_a_matrix_in_slices_loses_what_it_loses_as_a_whole() -> None:
    """Oracle: the same matrices, each added at once. The worst is a matrix, never a slice: one bad
    row of `a` does not make `a` worse than `b`."""
    a, b = random_matrix(40, 32, 3), random_matrix(40, 32, 4)
    a[7] *= torch.logspace(-4, 4, 32)
    held = {name: quantise_int8(x).values * 0.02 for name, x in (("a", a), ("b", b))}
    whole, sliced = Losses(lambda name: "Q6_K"), Losses(lambda name: "Q6_K")
    for name, exact in (("a", a), ("b", b)):
        whole.add(name, exact, held[name])
        for start in range(0, 40, 3):
            rows = slice(start, start + 3)
            sliced.add(name, exact[rows], held[name][rows])
    assert sliced.notes() == whole.notes()
