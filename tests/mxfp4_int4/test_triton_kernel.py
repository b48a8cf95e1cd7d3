# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The fused kernel compiled for gfx942, gfx950 and sm_90 on any machine: the assembly must show no
spills, no scratch, no shared memory, wide accesses. How fast it is only hardware can tell."""

import pytest

pytest.importorskip("triton")
import isa

# Vector instructions for a group of 32 codes: the kernel is as fast as these are few.
MOST = {"mse": 335, "absmax": 150}


def report(target: str, kernel: tuple[str, int, int, str]) -> isa.Report:
    if target == "sm_90" and not (isa.NVIDIA_TOOLS / "nvdisasm").exists():
        # PyPI's Triton has it, the one of a ROCm image has not.
        pytest.skip("this Triton carries no nvdisasm")
    return isa.report(target, kernel)


@pytest.mark.parametrize("kernel", isa.KERNELS, ids=lambda k: "-".join(map(str, k)))
@pytest.mark.parametrize("target", isa.TARGETS)
def test_registers_and_instructions(target, kernel):
    found = report(target, kernel)
    assert found.spills == 0
    assert found.shared == 0
    # So many hide what a wait for memory costs: each has all its reads under way at once.
    assert found.waves >= 6
    assert found.per_group <= MOST[kernel[3]]


@pytest.mark.parametrize("lanes", [32, 64])
def test_launches_of_every_row(lanes):
    """Whole blocks of 16 rows, no more of them than registers hold, and few idle lanes: none for
    the groups a row of Kimi-K3 has."""
    for groups in range(2, isa.triton_kernel.HELD_GROUPS // 16 + 1, 2):
        span, tiles, warps = isa.triton_kernel._spans(groups, "aiter", lanes)
        assert span % (16 * groups) == 0
        assert 1 <= tiles <= 8
        assert 1 <= warps <= 16
        idle = tiles * lanes * warps - span
        assert 0 <= idle < span / 4, groups
        if groups in (4, 6, 12, 24, 48, 96, 112):
            assert idle == 0, groups


@pytest.mark.parametrize("rule", ["mse", "absmax"])
@pytest.mark.parametrize("target", isa.TARGETS)
def test_counts_and_permutations_are_instructions_and_accesses_are_wide(target, rule):
    """A group is read in 16 bytes (AMD: twice 8) and written in twice 8, its scale in 1 and 2."""
    compiled = isa.compile_for(target, "aiter", 768, 112, rule)
    lanes = isa.TARGETS[target].warp_size
    span, tiles, warps = isa.triton_kernel._spans(112, "aiter", lanes)
    # One group a lane: of a smaller tile Triton gives the same group to several.
    assert f"end = {lanes * warps} : i32" in compiled.asm["ttgir"]
    assert tiles * lanes * warps == span
    found = report(target, ("aiter", 768, 112, rule))
    assert found.stores == {2: tiles, 8: 2 * tiles}
    assert found.loads[1] == tiles
    counts = 9 * tiles if rule == "mse" else 0
    if target == "sm_90":
        assert found.loads[16] == tiles
        assert compiled.asm["ptx"].count("popc.b32") == counts
        assert compiled.asm["ptx"].count("prmt.b32") == 24 * tiles
    else:
        assert found.loads[8] >= 2 * tiles
        assert compiled.asm["amdgcn"].count("v_bcnt_u32_b32") >= counts
        assert compiled.asm["amdgcn"].count("v_perm_b32") >= 24 * tiles
