// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
//
// native.c as a program, for sanitizers and emulators. Uses the fastest version that the CPU has.
//     program EXPERTS ROWS GROUPS LAYOUT MSE IN_PLACE < weight, scale > new weight, bf16 scales

#include <stdio.h>
#include <stdlib.h>

#include "native.c"

int main(int count, char **words) {
    ptrdiff_t v[6];
    if (count != 7) return 2;
    for (int i = 0; i < 6; i++) v[i] = atoi(words[i + 1]);
    size_t groups = (size_t)(v[0] * v[1] * v[2]), size = groups * PACKED;
    size_t new_size = v[3] == PLAIN ? 2 * size : size;
    uint8_t *weight = malloc(size), *scale = malloc(groups);
    uint8_t *out = v[5] ? weight : malloc(new_size);
    uint16_t *bits = malloc(2 * groups);
    uint8_t *held = malloc((size_t)(TILE_ROWS * v[2] * PACKED));
    if (fread(weight, 1, size, stdin) != size || fread(scale, 1, groups, stdin) != groups) return 3;
    convert(weight, scale, out, bits, v[0], v[1], v[2], v[1] * v[2], 2 * v[1], (int)v[3], (int)v[4],
            held, cpu_level());
    fwrite(out, 1, new_size, stdout);
    fwrite(bits, 2, groups, stdout);
    free(held), free(bits), free(scale), free(weight);
    if (out != weight) free(out);
    return 0;
}
