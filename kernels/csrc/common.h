/* What the files of this folder share. float32 rows are contiguous unless a stride is given. Every
 * row is computed in an order of its own data only, so that it does not depend on the rows beside
 * it. Built by native.py; kernels/cpu.py falls back on torch without it. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

enum { GRAIN = 16384 }; /* elements below which a second thread costs more than it brings */

/* exp(x) for x <= 0 to 2 units in the last place: x = n ln 2 + r, |r| <= ln 2 / 2, and a Taylor
 * polynomial of degree 7 in r. */
INLINE float exp_of_nonpositive(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union { int32_t bits; float value; } power;
    power.bits = ((int32_t)n + 127) << 23;
    return p * power.value;
}
