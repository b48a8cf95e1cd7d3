// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
//
// The conversion on a CPU, in the decisions of naive.py: a block of groups at a time, in integers.
// setup.py has native_numbers.py write native_numbers.h from definition.py and compiles both when the
// package is installed. The loops over a block are ones that compilers turn into vector code.
// Allocates nothing, keeps nothing, and touches no byte but those it is given.
//
// A group is 16 bytes, four words of 8 codes. In its bit planes, bit 4*i + w of plane p is bit p of
// code i of word w: a logic operation works on all 32 codes, and a population count counts them.

#include <stddef.h>
#include <string.h>

#include "native_numbers.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the layouts are those of little-endian machines"
#endif

enum { AITER, PACK_QUANTIZED, PLAIN };
enum { LANES = 32, PACKED = 16, TILE_ROWS = 16, TILE_GROUPS = LANES / TILE_ROWS };

typedef struct {  // one group a lane
    uint32_t words[LANES][4];
    uint8_t byte[LANES];   // e8m0
    uint8_t map[LANES];    // the row of the code table that gives the new codes
    uint16_t bits[LANES];  // bf16
} Block;

// All of the code is compiled once for every kind of CPU below.
#define INLINE static inline __attribute__((always_inline))

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Shorts __attribute__((vector_size(16)));

// table[index[i]] for 16 bytes at once, index under 16: the one thing that C has no form for.
#if defined(__SSSE3__)
#include <tmmintrin.h>
INLINE Bytes look_up(Bytes table, Bytes index) {
    return (Bytes)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
}
#elif defined(__aarch64__)
#include <arm_neon.h>
INLINE Bytes look_up(Bytes table, Bytes index) {
    return (Bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
}
#else
#error "needs SSSE3 or NEON"
#endif

INLINE Bytes load(const void *from) {
    Bytes x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE int32_t count(uint32_t plane, int vector_popcount) {
    if (vector_popcount) return __builtin_popcount(plane);
    // Not in the form that compilers take for a population count: GCC would not vectorize that.
    plane -= (plane >> 1) & 0x55555555;
    plane = (plane & 0x33333333) + ((plane >> 2) & 0x33333333);
    plane = (plane + (plane >> 4)) & 0x0F0F0F0F;
    plane += plane >> 8;
    return (int32_t)((plane + (plane >> 16)) & 63);
}

#define COUNT(plane) count(plane, popcount)

// Bits of a above the mask, `shift` up, <-> bits of b inside it.
#define SWAP(a, b, shift, mask)                      \
    do {                                             \
        uint32_t other = ((a >> shift) ^ b) & mask;  \
        a ^= other << shift;                         \
        b ^= other;                                  \
    } while (0)

#define PLANES(words, p0, p1, p2, sign)                                     \
    uint32_t p0 = words[0], p1 = words[1], p2 = words[2], sign = words[3];  \
    SWAP(p0, p1, 1, 0x55555555);                                            \
    SWAP(p2, sign, 1, 0x55555555);                                          \
    SWAP(p0, p2, 2, 0x33333333);                                            \
    SWAP(p1, sign, 2, 0x33333333)

// The candidate whose error is least, the first of equals: its key is 16 * error + its number.
#define TRY(number, e1, e2, e3, e4, e6, e8, e8n, e12, e12n)                                     \
    do {                                                                                        \
        int32_t key = c1 * e1 + c2 * e2 + c3 * e3 + c4 * e4 + c6 * e6 + (c8 - c8n) * e8         \
                      + c8n * e8n + (c12 - c12n) * e12 + c12n * e12n + number;                  \
        best = key < best ? key : best;                                                         \
    } while (0);

// Add counts[i] codes of one magnitude, its value in half units, to sum(v*q) and sum(q*q).
#define FIT(counts, magnitude, value)                              \
    do {                                                           \
        int32_t code = (sizes[i] >> (4 * magnitude)) & 15;         \
        fit += counts[i] * code * value;                           \
        norm += counts[i] * code * code;                           \
    } while (0)

INLINE void choose_mse(Block *block, int popcount) {
    // How many codes are 1, 2, 3, 4, 6, 8, 12 half units, -8 and -12.
    int32_t n1[LANES], n2[LANES], n3[LANES], n4[LANES], n6[LANES], n8[LANES], n12[LANES];
    int32_t n8n[LANES], n12n[LANES], choice[LANES];
    uint32_t sizes[LANES];
    for (int i = 0; i < LANES; i++) {
        PLANES(block->words[i], p0, p1, p2, sign);
        uint32_t none = ~(p0 | p1), low = p0 & ~p1, high = p1 & ~p0, both = p0 & p1;
        int32_t c1 = COUNT(low & ~p2), c2 = COUNT(high & ~p2), c3 = COUNT(both & ~p2);
        int32_t c4 = COUNT(none & p2), c6 = COUNT(low & p2), c8 = COUNT(high & p2);
        int32_t c12 = COUNT(both & p2);
        int32_t c8n = COUNT(high & p2 & sign), c12n = COUNT(both & p2 & sign);
        int32_t best = INT32_MAX;
        CANDIDATES(TRY)
        choice[i] = best & 15;
        n1[i] = c1, n2[i] = c2, n3[i] = c3, n4[i] = c4, n6[i] = c6, n8[i] = c8, n12[i] = c12;
        n8n[i] = c8n, n12n[i] = c12n;
    }
    for (int i = 0; i < LANES; i++) sizes[i] = MSE_SIZES[choice[i]];
    for (int i = 0; i < LANES; i++) {
        int32_t byte = block->byte[i], flipped = (NEGATIVE >> choice[i]) & 1, fit = 0, norm = 0;
        FIT(n1, 1, 1);
        FIT(n2, 2, 2);
        FIT(n3, 3, 3);
        FIT(n4, 4, 4);
        FIT(n6, 5, 6);
        FIT(n8, 6, 8);
        FIT(n12, 7, 12);
        // Code 8 exists below zero only; above it is 7: one v less, and 64 - 49 less of q*q.
        int32_t over8 = (flipped ? n8n[i] : n8[i] - n8n[i]) * (int32_t)(sizes[i] >> 27 & 1);
        int32_t over12 = (flipped ? n12n[i] : n12[i] - n12n[i]) * (int32_t)(sizes[i] >> 31);
        fit -= 8 * over8 + 12 * over12;
        norm -= 15 * (over8 + over12);
        int32_t empty = norm == 0;  // a group of zeros: its scale is one half unit
        fit += empty, norm += empty;
        int32_t steps = fit < 2 * norm ? 2 : 1;
        steps = byte < steps ? byte : steps;  // subnormals
        // Both under 2^20: a quotient that is no integer is further than 2^-20 of itself from one,
        // and its float is within 2^-24.
        float mantissa = (float)((fit << (steps + 6)) + norm) / (float)(2 * norm);
        block->bits[i] = (uint16_t)((int32_t)mantissa + 128 * (byte - steps) + (flipped << 15));
        block->map[i] = (uint8_t)choice[i];
    }
}

INLINE void choose_absmax(Block *block) {
    int32_t largest[LANES], last[LANES], offset[LANES];
    for (int i = 0; i < LANES; i++) {
        PLANES(block->words[i], p0, p1, p2, sign);
        (void)sign;
        // From the highest bit on: only codes that have it, if any has, can be the largest.
        uint32_t kept = p2 ? p2 : ~0u, next = p1 & kept;
        kept = next ? next : kept;
        largest[i] = (p2 ? 4 : 0) + (next ? 2 : 0) + (p0 & kept ? 1 : 0);
    }
    for (int i = 0; i < LANES; i++) {
        last[i] = ABSMAX_FLOOR_BYTE[largest[i]], offset[i] = ABSMAX_OFFSET[largest[i]];
    }
    for (int i = 0; i < LANES; i++) {
        int32_t byte = block->byte[i], under = byte;
        under = under < FLOOR_FIRST ? FLOOR_FIRST : under;
        under = (under > FLOOR_LAST ? FLOOR_LAST : under) - FLOOR_FIRST + FLOOR_MAPS;
        under = largest[i] ? under : 0;
        block->map[i] = (uint8_t)(byte <= last[i] ? under : largest[i]);
        block->bits[i] = (uint16_t)(byte <= last[i] ? ABSMAX_FLOOR_BITS : 128 * byte + offset[i]);
    }
}

INLINE void choose(Block *block, int mse, int popcount) {
    if (mse) {
        choose_mse(block, popcount);
    } else {
        choose_absmax(block);
    }
}

// The new codes of group i, by the low nibbles of x and by the high ones.
#define NEW_CODES(x, i, low, high)                                \
    Bytes low = look_up(load(table[block->map[i]][0]), x & 15);   \
    Bytes high = look_up(load(table[block->map[i]][1]), x >> 4)

// 16 rows of two groups -> [group, half, row, 8 bytes].
INLINE void write_aiter(const Block *block, const Codes *table, uint8_t *out) {
    for (int i = 0; i < LANES; i++) {
        // v0..v7 of a word become v0, v4, v1, v5, v2, v6, v3, v7: middle bytes, middle nibbles.
        Bytes x = load(block->words[i]);
        const Bytes middle = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
        Shorts pairs = (Shorts)look_up(x, middle);
        x = (Bytes)((pairs & 0xF00F) | (pairs & 0x00F0) << 4 | (pairs >> 4 & 0x00F0));
        NEW_CODES(x, i, low, high);
        x = low | high;
        uint8_t *half = out + (i / TILE_ROWS * 2 * TILE_ROWS + i % TILE_ROWS) * (PACKED / 2);
        memcpy(half, &x, PACKED / 2);
        memcpy(half + TILE_ROWS * (PACKED / 2), (const uint8_t *)&x + PACKED / 2, PACKED / 2);
    }
}

INLINE void write_packed(const Block *block, const Codes *table, uint8_t *out) {
    for (int i = 0; i < LANES; i++) {
        Bytes x = load(block->words[i]);
        NEW_CODES(x, i, low, high);
        x = low | high;
        memcpy(out + PACKED * i, &x, PACKED);
    }
}

// 8 bytes of x, those that `twice` names twice each: the low nibble and the high one.
INLINE Bytes nibbles(Bytes x, Bytes twice) {
    Shorts pairs = (Shorts)look_up(x, twice);
    return (Bytes)((pairs & 0x000F) | (pairs >> 4 & 0x0F00));
}

INLINE void write_plain(const Block *block, const Codes *table, uint8_t *out) {
    const Bytes front = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7}, back = front + 8;
    for (int i = 0; i < LANES; i++) {
        Bytes x = load(block->words[i]), codes = load(table[block->map[i]][0]);
        Bytes first = look_up(codes, nibbles(x, front)), second = look_up(codes, nibbles(x, back));
        memcpy(out + 2 * PACKED * i, &first, PACKED);
        memcpy(out + 2 * PACKED * i + PACKED, &second, PACKED);
    }
}

// 16 rows. In place they are first moved to `held`.
INLINE void convert_tile(const uint8_t *weight, const uint8_t *scale, uint8_t *out, uint16_t *bits,
                         ptrdiff_t groups, ptrdiff_t pair_stride, int mse, uint8_t *held,
                         int popcount) {
    Block block;
    ptrdiff_t row_bytes = groups * PACKED;
    if (weight == out) weight = memcpy(held, weight, (size_t)(TILE_ROWS * row_bytes));
    for (ptrdiff_t group = 0; group < groups; group += TILE_GROUPS) {
        for (int i = 0; i < LANES; i++) {
            ptrdiff_t row = i % TILE_ROWS, column = group + i / TILE_ROWS;
            memcpy(block.words[i], weight + row * row_bytes + column * PACKED, PACKED);
            block.byte[i] = scale[row * groups + column];
        }
        choose(&block, mse, popcount);
        write_aiter(&block, mse ? MSE_CODES[AITER] : ABSMAX_CODES[AITER],
                    out + group * TILE_ROWS * PACKED);
        uint16_t *pairs = bits + group / 2 * pair_stride;
        for (int row = 0; row < TILE_ROWS; row++) {
            pairs[2 * row] = block.bits[row];
            pairs[2 * row + 1] = block.bits[TILE_ROWS + row];
        }
    }
}

// Groups one after the other. In place is a matter of course: a block is read before it is written.
INLINE void convert_run(const uint8_t *weight, const uint8_t *scale, uint8_t *out, uint16_t *bits,
                        ptrdiff_t groups, int layout, int mse, int popcount) {
    Block block;
    uint8_t last[2 * PACKED * LANES];
    ptrdiff_t new_bytes = layout == PLAIN ? 2 * PACKED : PACKED;
    const Codes *table = mse ? MSE_CODES[layout] : ABSMAX_CODES[layout];
    memset(&block, 0, sizeof block);
    for (ptrdiff_t start = 0; start < groups; start += LANES) {
        size_t some = (size_t)(groups - start < LANES ? groups - start : LANES);
        uint8_t *place = out + start * new_bytes, *to = some < LANES ? last : place;
        memcpy(block.words, weight + start * PACKED, some * PACKED);
        memcpy(block.byte, scale + start, some);
        choose(&block, mse, popcount);
        if (layout == PLAIN) {
            write_plain(&block, table, to);
        } else {
            write_packed(&block, table, to);
        }
        if (to == last) memcpy(place, last, some * (size_t)new_bytes);
        memcpy(bits + start, block.bits, some * sizeof *bits);
    }
}

#define PARAMETERS                                                                              \
    const uint8_t *weight, const uint8_t *scale, uint8_t *out, uint16_t *bits,                  \
        ptrdiff_t experts, ptrdiff_t rows, ptrdiff_t groups, ptrdiff_t expert_stride,           \
        ptrdiff_t pair_stride, int layout, int mse, uint8_t *held

INLINE void convert_any(PARAMETERS, int popcount) {
    if (layout != AITER) {
        convert_run(weight, scale, out, bits, experts * rows * groups, layout, mse, popcount);
        return;
    }
    for (ptrdiff_t expert = 0; expert < experts; expert++) {
        for (ptrdiff_t row = 0; row < rows; row += TILE_ROWS) {
            ptrdiff_t first = (expert * rows + row) * groups;
            convert_tile(weight + first * PACKED, scale + first, out + first * PACKED,
                         bits + expert * expert_stride + 2 * row, groups, pair_stride, mse, held,
                         popcount);
        }
    }
}

// One version of `convert_any` for each kind of CPU.
#define VERSION(name, target, popcount)                                                         \
    target static void name(PARAMETERS) {                                                       \
        convert_any(weight, scale, out, bits, experts, rows, groups, expert_stride, pair_stride, \
                    layout, mse, held, popcount);                                               \
    }

VERSION(convert_baseline, , 0)
#if defined(__x86_64__)
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi,bmi2,fma"
VERSION(convert_avx2, __attribute__((target("avx2,bmi,bmi2,fma"))), 0)
VERSION(convert_avx512, __attribute__((target(AVX512))), 0)
#define POPCOUNT AVX512 ",avx512vbmi,avx512vpopcntdq,popcnt,tune=icelake-server"
VERSION(convert_avx512_popcount, __attribute__((target(POPCOUNT))), 1)
#endif

// Which versions this CPU has: 0 (none), 1 (the baseline), 2 (AVX2 too), 3 (AVX-512), 4 (and its
// population count).
int cpu_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2")) return 0;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi2")) return 1;
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")
        || !__builtin_cpu_supports("avx512dq"))
        return 2;
    return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vpopcntdq") ? 4 : 3;
#else
    return 1;
#endif
}

// weight [experts, rows, groups * 16], scale [experts, rows, groups], and in the layout out (may be
// weight, unless plain) and bits, all contiguous, but for bits in AITER's: an expert lies every
// expert_stride elements, a pair of groups every pair_stride. held, for AITER's layout: room for 16
// rows of weight. level: at most that of `cpu_level`.
void convert(PARAMETERS, int level) {
    void (*version)(PARAMETERS) = convert_baseline;
#if defined(__x86_64__)
    if (level == 2) version = convert_avx2;
    if (level == 3) version = convert_avx512;
    if (level == 4) version = convert_avx512_popcount;
#else
    (void)level;
#endif
    version(weight, scale, out, bits, experts, rows, groups, expert_stride, pair_stride, layout,
            mse, held);
}

uint8_t largest(const uint8_t *bytes, ptrdiff_t count) {
    uint8_t found = 0;
    for (ptrdiff_t i = 0; i < count; i++) found = bytes[i] > found ? bytes[i] : found;
    return found;
}
