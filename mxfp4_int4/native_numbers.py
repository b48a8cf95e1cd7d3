# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The numbers of `definition` as C, for native.c: `python -m mxfp4_int4.native_numbers` prints
native_numbers.h. setup.py calls it; nothing at run time does."""

from collections.abc import Iterable

from .definition import (
    ABSMAX_FLOOR_BITS,
    ABSMAX_FLOOR_BYTE,
    ABSMAX_SCALE_OFFSET,
    CANDIDATES,
    FLOOR_BYTES,
    KEY,
    MAGNITUDES,
    SIGNED,
    absmax_maps,
    candidate_code,
    candidate_error,
    mse_maps,
)
from .options import LAYOUTS


def _braces(values: object) -> str:
    if isinstance(values, Iterable) and not isinstance(values, str):
        return "{" + ", ".join(map(_braces, values)) + "}"
    return str(values)


def _code_tables(maps: list[dict[int, int]]) -> str:
    """By layout and map: the new code of each e2m1 code as it lies in a byte when it stands in the
    source's low nibble, and in its high one."""
    by_code = [[codes.get(v, 0) for v in SIGNED] for codes in maps]
    tables = {}
    for layout, offset in (("aiter", 0), ("pack_quantized", 8)):
        nibbles = [[(q + offset) & 15 for q in row] for row in by_code]
        tables[layout] = [(row, [q << 4 for q in row]) for row in nibbles]
    tables["plain"] = [([q & 255 for q in row],) * 2 for row in by_code]
    return _braces(tables[layout] for layout in LAYOUTS)


def header() -> str:
    """The text of native_numbers.h."""
    values = (1, 2, 3, 4, 6, 8, -8, 12, -12)
    candidates = " ".join(
        f"TRY({i}, {', '.join(str(KEY * candidate_error(v, c)) for v in values)})"
        for i, c in enumerate(CANDIDATES)
    )
    # |code| by magnitude on the side where it reaches 8, four bits each
    sizes = [
        sum(abs(candidate_code(-m if c > 0 else m, c)) << (4 * i) for i, m in enumerate(MAGNITUDES))
        for c in CANDIDATES
    ]
    absmax, mse = absmax_maps(), mse_maps()
    return f"""#include <stdint.h>
typedef uint8_t Codes[2][16];
#define CANDIDATES(TRY) {candidates}
#define NEGATIVE {sum((c < 0) << i for i, c in enumerate(CANDIDATES))}
#define ABSMAX_FLOOR_BITS {ABSMAX_FLOOR_BITS}
#define FLOOR_FIRST {FLOOR_BYTES[0]}
#define FLOOR_LAST {FLOOR_BYTES[-1]}
#define FLOOR_MAPS {len(MAGNITUDES)}
static const uint32_t MSE_SIZES[] = {_braces(f"{size}u" for size in sizes)};
static const int32_t ABSMAX_FLOOR_BYTE[] = {_braces(ABSMAX_FLOOR_BYTE)};
static const int32_t ABSMAX_OFFSET[] = {_braces(ABSMAX_SCALE_OFFSET)};
static const Codes MSE_CODES[][{len(mse)}] = {_code_tables(mse)};
static const Codes ABSMAX_CODES[][{len(absmax)}] = {_code_tables(absmax)};
"""


if __name__ == "__main__":
    print(header(), end="")
