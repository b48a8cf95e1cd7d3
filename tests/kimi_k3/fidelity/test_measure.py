# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Figures against the conversion's own statistics, whose sums are exact, and against numpy."""

from pathlib import Path

import pytest
import torch

from kimi_k3.fidelity.files import Matrix, Rows
from kimi_k3.fidelity.measure import (
    measure_all,
    measure_matrix,
    sampled_rows,
)
from mxfp4_int4 import (
    convert_experts,
    dequantize,
    dequantize_mxfp4,
)

ROWS, COLUMNS = 48, 256


def on_disk(folder: Path, **tensors: torch.Tensor) -> dict[str, Rows]:
    found = {}
    for name, tensor in tensors.items():
        file = folder / name
        file.write_bytes(b"head" + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        found[name] = Rows(file, 4, len(tensor), tensor[0].numel() * tensor.element_size())
    return found


def source(low: int, high: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=generator, dtype=torch.uint8)
    codes[0] = 0
    codes[1] &= 0x33
    scales = torch.randint(low, high, (ROWS, COLUMNS // 32), generator=generator).byte()
    return codes, scales


def matrix(folder: Path, codes, scales, weight, scale, name="layers.3.experts.0.w1") -> Matrix:
    places = on_disk(folder, codes=codes, scales=scales, weight=weight, scale=scale)
    return Matrix(
        name,
        len(weight),
        weight.shape[1] * 8,
        places["weight"],
        places["scale"],
        places["codes"],
        places["scales"],
    )


@pytest.mark.parametrize("rule", ["mse", "absmax"])
@pytest.mark.parametrize(("low", "high"), [(110, 122), (0, 4), (90, 108), (200, 253)])
def test_figures_are_those_of_the_conversion(tmp_path, rule, low, high):
    codes, scales = source(low, high)
    out = convert_experts(
        codes[None], scales[None], layout="pack_quantized", scale_rule=rule, collect_stats=True
    )
    figures, _ = measure_matrix(
        matrix(tmp_path, codes, scales, out.weight[0], out.scale[0]), 1.0, 5
    )
    stats = out.stats
    assert figures.compared == figures.groups == stats.groups
    assert figures.exact == stats.exact_groups
    assert figures.zero == stats.zero_groups
    assert figures.collapsed == stats.collapsed_groups
    assert figures.broken == 0
    # Sums here are float32 within a group of 32 and float64 beyond.
    assert figures.relative_squared_error == pytest.approx(stats.relative_squared_error, rel=1e-6)
    assert figures.largest_error == pytest.approx(stats.max_abs_error, rel=1e-6)
    assert sum(figures.scales[256:]) == stats.negative_scales


def test_histograms_and_worst_groups_are_what_is_stored(tmp_path):
    codes, scales = source(112, 120)
    out = convert_experts(codes[None], scales[None], layout="pack_quantized")
    made = matrix(tmp_path, codes, scales, out.weight[0], out.scale[0])
    figures, groups = measure_matrix(made, 1.0, 4)

    plain = convert_experts(codes[None], scales[None], layout="plain")
    values, counts = plain.weight.unique(return_counts=True)
    expected = dict(zip(values.tolist(), counts.tolist(), strict=True))
    assert {c: n for c, n in figures.code_histogram().items() if n} == expected
    exponents = torch.frexp(plain.scale.float().abs()).exponent - 1
    for exponent, (positive, negative) in figures.scale_histogram().items():
        here = plain.scale[exponents == exponent]
        assert (positive, negative) == (int((here > 0).sum()), int((here < 0).sum()))

    shape = (1, ROWS, COLUMNS)
    truth = dequantize_mxfp4(codes[None], scales[None], torch.float64).view(-1, 32)
    ours = dequantize(out, "pack_quantized", shape, torch.float64).view(-1, 32)
    relative = (truth - ours).square().sum(-1) / truth.square().sum(-1)
    relative = relative.nan_to_num(nan=0.0)
    best = relative.topk(4).values
    assert [group.error for group in groups] == pytest.approx(best.tolist(), rel=1e-6)
    for group in groups:
        place = group.row * (COLUMNS // 32) + group.group
        assert relative[place] == pytest.approx(group.error, rel=1e-6)
        assert group.scale == out.scale[0, group.row, group.group]


@pytest.mark.parametrize("damage", [float("nan"), float("inf"), 3e38])
def test_a_scale_that_is_no_number_is_counted_apart(tmp_path, damage):
    codes, scales = source(100, 104)
    out = convert_experts(codes[None], scales[None], layout="pack_quantized")
    clean, _ = measure_matrix(matrix(tmp_path, codes, scales, out.weight[0], out.scale[0]), 1, 1)
    broken = out.scale[0].clone()
    broken[5, 2] = damage
    figures, groups = measure_matrix(matrix(tmp_path, codes, scales, out.weight[0], broken), 1, 1)
    assert (figures.broken, clean.broken) == (1, 0)
    assert (groups[0].row, groups[0].group) == (5, 2)
    assert 0 < figures.squared_error < clean.squared_error * 1.01


def test_without_a_source_codes_and_scales_are_counted(tmp_path):
    codes, scales = source(112, 120)
    out = convert_experts(codes[None], scales[None], layout="pack_quantized")
    made = matrix(tmp_path, codes, scales, out.weight[0], out.scale[0])
    alone = Matrix(made.name, made.rows, made.columns, made.codes, made.scales)
    figures, groups = measure_matrix(alone, 1.0, 5)
    compared, _ = measure_matrix(made, 1.0, 5)
    assert (figures.codes, figures.scales) == (compared.codes, compared.scales)
    assert (figures.compared, groups) == (0, [])


def test_all_matrices_come_in_their_order(tmp_path):
    made = []
    for seed in range(5):
        (tmp_path / str(seed)).mkdir()
        codes, scales = source(112, 120, seed)
        out = convert_experts(codes[None], scales[None], layout="pack_quantized")
        made.append(matrix(tmp_path / str(seed), codes, scales, out.weight[0], out.scale[0]))
    together = list(measure_all(made, 1.0, 3))
    assert together == [measure_matrix(one, 1.0, 3) for one in made]
    assert list(measure_all([], 1.0, 3)) == []


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 48, 1001])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 1e-9])
def test_samples_lie_in_the_matrix_and_do_not_overlap(rows, share):
    parts = sampled_rows(rows, share)
    taken = [row for first, count in parts for row in range(first, first + count)]
    assert len(taken) == len(set(taken))
    assert all(0 <= row < rows for row in taken)
    assert len(taken) == (max(1, round(rows * share)) if rows else 0)
