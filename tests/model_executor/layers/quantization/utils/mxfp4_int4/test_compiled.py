# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The fused kernel compiled for gfx942, gfx950 and sm_90 on any machine: the compilers' reports
must show no spills, no scratch, little shared memory. How fast it is only hardware can tell."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from vllm.model_executor.layers.quantization.utils.mxfp4_int4 import (  # noqa: E402
    triton_bits,
    triton_kernel,
)

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
}
PERMUTE = {
    "gfx942": triton_bits.V_PERM.value,
    "gfx950": triton_bits.V_PERM.value,
    "sm_90": triton_bits.PRMT.value,
}
LAYOUTS = {"aiter": 0, "pack_quantized": 1, "plain": 2}
# K3 at TP8: w13 (112 groups a row), w2 (12); TP1 w2 (96); rows too long to be held (258).
KERNELS = [
    ("aiter", 768, 112, "mse"),
    ("aiter", 768, 112, "absmax"),
    ("aiter", 3584, 12, "mse"),
    ("aiter", 16, 258, "mse"),
    ("plain", 768, 112, "mse"),
]


def compile_for(target: str, layout: str, rows: int, groups: int, rule: str):
    """The kernel as `convert_slab` launches it, in place where that is possible."""
    span, tiles, warps, run = triton_kernel._spans(groups, layout)
    constants = {
        "per_expert": rows,
        "groups": groups,
        "LAYOUT": LAYOUTS[layout],
        "MSE": rule == "mse",
        "SPAN": span,
        "TILE": 32 * warps,
        "TILES": tiles,
        "RUN": run,
        "IN_PLACE": triton_kernel.converts_in_place(layout, groups),
        "PERMUTE": PERMUTE[target],
    }
    kernel = triton_kernel._convert_kernel
    pointers = {
        "weight": "*i64",
        "scale": "*u8",
        "table": "*i64",
        "out_weight": "*i64",
        "out_scale": "*i16",
    }
    signature = pointers | {"total": "i32", "guard": "*i32"} | dict.fromkeys(constants, "constexpr")
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, "total")
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, aligned)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": warps})


def amd_report(assembly: str) -> dict[str, int]:
    """Registers, spills, scratch and LDS from the metadata at the end of the assembly."""
    names = "vgpr_count|vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size"
    found = re.findall(rf"\.({names}|group_segment_fixed_size):\s+(\d+)", assembly)
    return {name: int(value) for name, value in found}


def nvidia_report(cubin: bytes, folder: Path) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL as cuobjdump of Triton's own package reports them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        # PyPI's Triton has it, the one of a ROCm image has not.
        pytest.skip("this Triton carries no cuobjdump")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [str(tool), "--dump-resource-usage", str(path)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", report)}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: "-".join(map(str, k)))
@pytest.mark.parametrize("target", TARGETS)
def test_no_spills_and_little_shared_memory(target, kernel, tmp_path):
    compiled = compile_for(target, *kernel)
    assert compiled.metadata.shared <= 64 * 1024
    if target == "sm_90":
        report = nvidia_report(compiled.asm["cubin"], tmp_path)
        assert report["STACK"] == report["LOCAL"] == 0
        assert 0 < report["REG"] <= 128
        return
    assembly = compiled.asm["amdgcn"]
    report = amd_report(assembly)
    assert report["vgpr_spill_count"] == report["sgpr_spill_count"] == 0
    assert report["private_segment_fixed_size"] == 0
    assert report["group_segment_fixed_size"] <= 64 * 1024
    # Four waves a SIMD and more: 512 registers shared by the waves of a SIMD.
    assert 0 < report["vgpr_count"] <= 128
    assert "scratch_" not in assembly


@pytest.mark.parametrize("target", TARGETS)
def test_counts_are_one_instruction_and_accesses_are_wide(target):
    """Population counts and byte permutations in hardware; 16 bytes a read, 8 a write."""
    compiled = compile_for(target, "aiter", 768, 112, "mse")
    tiles = triton_kernel._spans(112, "aiter")[1]
    if target == "sm_90":
        code = compiled.asm["ptx"]
        assert code.count("popc.b32") == 9 * tiles
        assert code.count("prmt.b32") == 24 * tiles
        assert code.count("ld.global.v2.b64") == tiles
        assert len(re.findall(r"st\.global\.b64", code)) == 2 * tiles
    else:
        code = compiled.asm["amdgcn"]
        assert code.count("v_bcnt_u32_b32") >= 9 * tiles
        assert code.count("v_perm_b32") >= 24 * tiles
        assert "ds_write" not in code
        assert len(re.findall(r"(?:global|buffer)_load_dwordx[24]", code)) >= 2 * tiles
        assert len(re.findall(r"(?:global|buffer)_store_dwordx[24]", code)) >= tiles
