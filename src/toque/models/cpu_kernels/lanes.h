/* Sixteen numbers at once, for processors with AVX512-BF16.
 *
 * Kernels read and write 16 bits, rounded to nearest even, and compute in float32. A result does not
 * depend on the number of threads: no sum is shared among them. NaN and infinity stay what they are,
 * so that whoever looks for them finds them. fused.py says what every pointer is. */

#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;
typedef __m512 Lanes; /* 16 float32 */

enum { WIDTH = 16, PART_ROWS = 64 };

static inline __mmask16 lanes(long left) { /* of the next `left` values, at most 16 */
    return left >= WIDTH ? 0xffff : (__mmask16)((1u << left) - 1u);
}

static inline Lanes all(float value) { return _mm512_set1_ps(value); }

static inline Lanes load(const bf16 *from, __mmask16 mask) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline void store(bf16 *to, __mmask16 mask, Lanes values) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

static inline Lanes rounded(Lanes values) {
    __m512i bits = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline float wide(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float exact;
    memcpy(&exact, &bits, sizeof exact);
    return exact;
}

/* e^x to 2 units in the last place: 2^n times a polynomial in what is left (Cephes, expf). */
static inline Lanes exponential(Lanes x) {
    x = _mm512_max_ps(all(-104.0f), x); /* of a NaN the second, which is it */
    Lanes n = _mm512_roundscale_ps(_mm512_mul_ps(x, all(1.44269504f)), 8);
    Lanes r = _mm512_fnmadd_ps(n, all(0.693359375f), x);
    r = _mm512_fmadd_ps(n, all(2.12194440e-4f), r);
    Lanes p = all(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, all(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, all(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, all(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, all(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, all(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, all(1.0f)));
    return _mm512_scalef_ps(p, n);
}
