# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What the compilers make of the fused conversion kernel, for GPUs that need not be there.

    python benchmarks/isa.py

Compiles the kernel as it is launched and counts, in the final assembly: registers and the waves (or
warps) of a SIMD that they leave room for, shared memory, spills, vector instructions for each group
of 32 codes, and the width of accesses to memory. No time comes out of this: latencies, caches and
clocks are the hardware's.
"""

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from _options import json_file
from _result import machine, write
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mxfp4_int4 import triton_bits, triton_kernel

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
}
# Layout, rows of an expert, groups of a row, rule. K3 at TP8: w13 and w2; TP1: w2; rows too long to
# be held; and the layout that writes most.
KERNELS = [
    ("aiter", 768, 112, "mse"),
    ("aiter", 768, 112, "absmax"),
    ("aiter", 3584, 12, "mse"),
    ("aiter", 3584, 12, "absmax"),
    ("aiter", 3584, 96, "mse"),
    ("aiter", 16, 258, "mse"),
    ("plain", 768, 112, "mse"),
    ("pack_quantized", 768, 112, "mse"),
]
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
WORDS = {"": 4, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ubyte": 1, "short": 2}


@dataclass
class Report:
    """Of one kernel on one target.

    Attributes:
        registers: Vector registers of a lane.
        waves: Waves of a SIMD (warps of a scheduler) for which there are registers.
        shared: Bytes of LDS or shared memory.
        spills: Registers spilled, and bytes of scratch memory.
        per_group: Vector instructions for a group of 32 codes.
        integer: Of these, the ones of NVIDIA's integer pipe, which takes half a warp a cycle.
        loads: Bytes of a lane's access -> such loads in the code.
        stores: The same of stores.
    """

    registers: int
    waves: int
    shared: int
    spills: int
    per_group: float
    integer: float | None
    loads: dict[int, int]
    stores: dict[int, int]


def compile_for(target: str, layout: str, rows: int, groups: int, rule: str) -> Any:
    """The kernel as `convert_slab` launches it, in place where that is possible."""
    lanes = TARGETS[target].warp_size
    span, tiles, warps = triton_kernel._spans(groups, layout, lanes)
    hip = TARGETS[target].backend == "hip"
    constants = {
        "per_expert": rows,
        "groups": groups,
        "LAYOUT": triton_kernel._LAYOUT_CODES[layout],
        "MSE": rule == "mse",
        "SPAN": span,
        "TILE": lanes * warps,
        "TILES": tiles,
        "IN_PLACE": triton_kernel.converts_in_place(layout, groups),
        "PERMUTE": (triton_bits.V_PERM if hip else triton_bits.PRMT).value,
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


def report(target: str, kernel: tuple[str, int, int, str]) -> Report:
    """Compile and count.

    Raises:
        FileNotFoundError: this Triton carries none of NVIDIA's tools (a ROCm image's).
    """
    compiled = compile_for(target, *kernel)
    tiles = triton_kernel._spans(kernel[2], kernel[0], TARGETS[target].warp_size)[1]
    if TARGETS[target].backend == "hip":
        return _amd_report(compiled.asm["amdgcn"], tiles)
    return _nvidia_report(compiled.asm["cubin"], tiles, compiled.metadata.shared)


def _amd_report(assembly: str, tiles: int) -> Report:
    found = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)$", assembly, re.M)}
    names = re.findall(r"^\s+([a-z]\w+)\s", assembly, re.M)
    access = re.compile(r"(?:global|buffer|flat)_(load|store)_(\w+)")
    widths = Counter((m[1], WORDS[m[2]]) for m in map(access.fullmatch, names) if m)
    registers = found["vgpr_count"]
    return Report(
        registers=registers,
        # CDNA3 and 4: 512 registers a lane of a SIMD, handed out by eights, to at most 8 waves.
        waves=min(8, 512 // max(8, -(-registers // 8) * 8)),
        shared=found["group_segment_fixed_size"],
        spills=found["vgpr_spill_count"]
        + found["sgpr_spill_count"]
        + found["private_segment_fixed_size"],
        per_group=sum(name.startswith("v_") for name in names) / tiles,
        integer=None,
        loads={width: n for (kind, width), n in sorted(widths.items()) if kind == "load"},
        stores={width: n for (kind, width), n in sorted(widths.items()) if kind == "store"},
    )


def _nvidia_report(cubin: bytes, tiles: int, shared: int) -> Report:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    found = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", code, re.M)
    access = re.compile(r"(LDG|STG)\.E(?:\.(U8|U16|64|128))?\b.*")
    bits = {"U8": 1, "U16": 2, None: 4, "64": 8, "128": 16}
    widths = Counter((m[1], bits[m[2]]) for m in map(access.fullmatch, names) if m)
    # Not of the vector pipes: uniform registers, control flow, memory.
    other = re.compile(r"U[A-Z]|BRA|EXIT|NOP|BAR|LDG|STG|LDC|S2|BSYNC|BSSY|RET|CALL|WARPSYNC")
    integer = re.compile(
        r"(LOP3|IADD3|SHF|ISETP|SEL|V?IMNMX3?|VIADD(MNMX)?|LEA|PRMT|MOV|PLOP3|FSETP|FMNMX|BMSK|SGXT|"
        r"FSEL|IABS|P2R|R2P)\b"
    )
    return Report(
        registers=found["REG"],
        # Hopper: 512 registers a lane of a scheduler, handed out by eights, to at most 16 warps.
        waves=min(16, 512 // (-(-found["REG"] // 8) * 8)),
        shared=shared,
        spills=found["STACK"] + found["LOCAL"],
        per_group=sum(not other.match(name) for name in names) / tiles,
        integer=sum(bool(integer.match(name)) for name in names) / tiles,
        loads={width: n for (kind, width), n in sorted(widths.items()) if kind == "LDG"},
        stores={width: n for (kind, width), n in sorted(widths.items()) if kind == "STG"},
    )


def _run(tool: str, *arguments: str) -> str:
    path = NVIDIA_TOOLS / tool
    command = [str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=json_file, help="also write the figures here")
    options = parser.parse_args()
    print("| GPU | layout, groups a row | rule | registers | waves | shared | spills", end="")
    print(" | instructions a group | integer pipe | bytes a load | bytes a store |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |")
    results = []
    for target in TARGETS:
        for kernel in KERNELS:
            layout, _, groups, rule = kernel
            one = report(target, kernel)
            loads, stores = (
                ", ".join(f"{n} x {width}" for width, n in widths.items())
                for widths in (one.loads, one.stores)
            )
            counts = f"{one.per_group:.0f} | " + (f"{one.integer:.0f}" if one.integer else "")
            print(
                f"| {target} | {layout}, {groups} | {rule} | {one.registers} | {one.waves} | "
                f"{one.shared} | {one.spills} | {counts} | {loads} | {stores} |"
            )
            results.append({"target": target, "kernel": kernel, **asdict(one)})
    write(options.json, "isa", machine(threads=1), results)


if __name__ == "__main__":
    main()
