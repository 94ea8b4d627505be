/* Elementwise work of bfloat16 training on a CPU with AVX512-BF16, each in as few passes over memory
 * as it needs: softmax of the output head and of attention, GELU and SiLU, RMSNorm.
 *
 * All arithmetic is float32; 16 bits are read and written (rounded to nearest even). A result does
 * not depend on the number of threads: no sum is shared among them. NaN and infinity stay what they
 * are, so that whoever looks for them finds them.
 *
 * Compiled at run time by library.py, which says what every pointer is. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;
typedef __m512 Lanes; /* 16 float32 */

enum { WIDTH = 16, PART_ROWS = 64 };
enum { SILU = 0, GELU_TANH = 1, GELU_ERF = 2 };

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

/* ---- softmax ---------------------------------------------------------------------------------- */

/* exact[j] = e^(scale * row[j] + added[j] - top); the sum of all is returned, and the top. */
static float exponentials(const bf16 *row, const float *added, float scale, long n, float *exact,
                          float *top) {
    Lanes best = all(-INFINITY), factor = all(scale), sum = _mm512_setzero_ps();
    for (long j = 0; j < n; j += WIDTH) {
        __mmask16 mask = lanes(n - j);
        Lanes x = _mm512_mul_ps(load(row + j, mask), factor);
        if (added) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, added + j));
        best = _mm512_mask_max_ps(best, mask, x, best);
    }
    *top = _mm512_reduce_max_ps(best);
    Lanes most = all(*top);
    for (long j = 0; j < n; j += WIDTH) {
        __mmask16 mask = lanes(n - j);
        Lanes x = _mm512_mul_ps(load(row + j, mask), factor);
        if (added) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, added + j));
        x = _mm512_maskz_mov_ps(mask, exponential(_mm512_sub_ps(x, most)));
        _mm512_storeu_ps(exact + j, x); /* room up to a multiple of 16 */
        sum = _mm512_add_ps(sum, x);
    }
    return _mm512_reduce_add_ps(sum);
}

static void shares(const float *exact, float total, bf16 *row, long n) {
    Lanes factor = all(1.0f / total);
    for (long j = 0; j < n; j += WIDTH)
        store(row + j, lanes(n - j), _mm512_mul_ps(_mm512_loadu_ps(exact + j), factor));
}

static float *scratch(long n) { return malloc(sizeof(float) * (size_t)(n + WIDTH)); }

/* Logits [rows, stride] become softmax minus one at the target, zero from `vocabulary` on. */
void head_slopes(bf16 *logits, long rows, long stride, long vocabulary, const float *bias,
                 const int64_t *targets, float *losses, int threads) {
#pragma omp parallel num_threads(threads)
    {
        float *exact = scratch(vocabulary);
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            bf16 *row = logits + r * stride;
            long target = targets[r];
            float top, own = wide(row[target]) + (bias ? bias[target] : 0.0f);
            float total = exponentials(row, bias, 1.0f, vocabulary, exact, &top);
            losses[r] = logf(total) + (top - own);
            float share = exact[target] / total;
            shares(exact, total, row, vocabulary);
            store(row + target, 1, all(share - 1.0f));
            memset(row + vocabulary, 0, sizeof(bf16) * (size_t)(stride - vocabulary));
        }
        free(exact);
    }
}

/* Scores [heads, examples, t, s] become attention weights. Of an example the first `keys` are real,
 * and of those, if causal, the ones up to the query. Bias [heads, 2 * zero + 1] by distance. */
static inline long seen(const int64_t *keys, long example, long query, long causal) {
    return causal && query + 1 < keys[example] ? query + 1 : keys[example];
}

void attention_weights(bf16 *scores, long heads, long examples, long t, long s, float scale,
                       const float *bias, long zero, const int64_t *keys, long causal, int threads) {
#pragma omp parallel num_threads(threads)
    {
        float *exact = scratch(s);
#pragma omp for schedule(static)
        for (long r = 0; r < heads * examples * t; r++) {
            long query = r % t, n = seen(keys, r / t % examples, query, causal);
            const float *added = bias ? bias + r / t / examples * (2 * zero + 1) + zero - query : 0;
            bf16 *row = scores + r * s;
            float top, total = exponentials(row, added, scale, n, exact, &top);
            shares(exact, total, row, n);
            memset(row + n, 0, sizeof(bf16) * (size_t)(s - n));
        }
        free(exact);
    }
}

/* Gradients of the weights become those of the scores before `scale`: scale * p * (g - sum(p * g)). */
static void weights_row(const bf16 *p, bf16 *g, long n, long s, float scale, float *of_bias) {
    Lanes sum = _mm512_setzero_ps();
    for (long j = 0; j < n; j += WIDTH) {
        __mmask16 mask = lanes(n - j);
        sum = _mm512_fmadd_ps(load(p + j, mask), load(g + j, mask), sum);
    }
    Lanes dot = all(_mm512_reduce_add_ps(sum)), factor = all(scale);
    for (long j = 0; j < n; j += WIDTH) {
        __mmask16 mask = lanes(n - j);
        Lanes slope = _mm512_mul_ps(load(p + j, mask), _mm512_sub_ps(load(g + j, mask), dot));
        if (of_bias) {
            Lanes before = _mm512_maskz_loadu_ps(mask, of_bias + j);
            _mm512_mask_storeu_ps(of_bias + j, mask, _mm512_add_ps(before, slope));
        }
        store(g + j, mask, _mm512_mul_ps(slope, factor));
    }
    memset(g + n, 0, sizeof(bf16) * (size_t)(s - n));
}

/* A thread has whole heads where they have a bias, whose gradient is summed in one order. */
void attention_weights_backward(const bf16 *weights, bf16 *slopes, long heads, long examples, long t,
                                long s, float scale, float *of_bias, long zero, const int64_t *keys,
                                long causal, int threads) {
    long outer = of_bias ? heads : heads * examples, inner = of_bias ? examples * t : t;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long part = 0; part < outer; part++)
        for (long r = part * inner; r < (part + 1) * inner; r++) {
            long query = r % t, n = seen(keys, r / t % examples, query, causal);
            float *sums = of_bias ? of_bias + part * (2 * zero + 1) + zero - query : 0;
            weights_row(weights + r * s, slopes + r * s, n, s, scale, sums);
        }
}

/* ---- tokens to groups of examples and back ---------------------------------------------------- */

/* Tokens [N, width, size] to [width, places, size]: place p has token where[p]; if `hollow`, places
 * beyond an example's own `counts` of its `length` are zero. */
void stack(const bf16 *tokens, const int64_t *where, const int64_t *counts, bf16 *out, long places,
           long length, long width, long size, long hollow, int threads) {
    size_t bytes = sizeof(bf16) * (size_t)size;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long p = 0; p < places; p++) {
        const bf16 *from = tokens + where[p] * width * size;
        long empty = hollow && p % length >= counts[p / length];
        for (long w = 0; w < width; w++) {
            bf16 *to = out + (w * places + p) * size;
            if (empty) memset(to, 0, bytes);
            else memcpy(to, from + w * size, bytes);
        }
    }
}

/* The way back, without the places of padding, whose tokens are others'. */
void unstack(const bf16 *stacked, const int64_t *where, const int64_t *counts, bf16 *tokens,
             long places, long length, long width, long size, int threads) {
    size_t bytes = sizeof(bf16) * (size_t)size;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long p = 0; p < places; p++) {
        if (p % length >= counts[p / length]) continue;
        bf16 *to = tokens + where[p] * width * size;
        for (long w = 0; w < width; w++)
            memcpy(to + w * size, stacked + (w * places + p) * size, bytes);
    }
}

/* Rotary positions of the first `heads` of [N, width, size], in place: of each the first `turned`
 * numbers, whose halves (a, b) become (a cos - b sin, b cos + a sin), `turn` -1 the other way round.
 * cos and sin [N, turned]. */
void rotate(bf16 *packed, const float *cosines, const float *sines, long n, long width, long heads,
            long size, long turned, float turn, int threads) {
    long half = turned / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long token = 0; token < n; token++) {
        const float *c = cosines + token * turned, *s = sines + token * turned;
        for (long h = 0; h < heads; h++) {
            bf16 *head = packed + (token * width + h) * size;
            for (long j = 0; j < half; j += WIDTH) {
                __mmask16 mask = lanes(half - j);
                Lanes a = load(head + j, mask), b = load(head + half + j, mask);
                Lanes c1 = _mm512_maskz_loadu_ps(mask, c + j), c2 = _mm512_maskz_loadu_ps(mask, c + half + j);
                Lanes s1 = _mm512_maskz_loadu_ps(mask, s + j), s2 = _mm512_maskz_loadu_ps(mask, s + half + j);
                s1 = _mm512_mul_ps(s1, all(turn)), s2 = _mm512_mul_ps(s2, all(turn));
                store(head + j, mask, _mm512_fnmadd_ps(b, s1, _mm512_mul_ps(a, c1)));
                store(head + half + j, mask, _mm512_fmadd_ps(a, s2, _mm512_mul_ps(b, c2)));
            }
        }
    }
}

/* ---- activations ------------------------------------------------------------------------------ */

/* The activation and its slope at x. SiLU: x * s(x). GELU's tanh form is x * s(2 u) with u =
 * sqrt(2/pi) * (x + 0.044715 x^3), since (1 + tanh(u)) / 2 = s(2 u) (Hendrycks and Gimpel 2016, arXiv
 * 1606.08415, section 2). GELU itself: x * phi(x), the error function by Abramowitz and Stegun,
 * formula 7.1.26 (1.5e-7). */
static inline Lanes activation(Lanes x, long kind, Lanes *slope) {
    Lanes one = all(1.0f);
    if (kind == GELU_ERF) {
        Lanes z = _mm512_mul_ps(_mm512_abs_ps(x), all(0.70710678f));
        Lanes bell = exponential(_mm512_fnmadd_ps(z, z, _mm512_setzero_ps()));
        Lanes t = _mm512_div_ps(one, _mm512_fmadd_ps(z, all(0.3275911f), one));
        Lanes p = all(1.061405429f);
        p = _mm512_fmadd_ps(p, t, all(-1.453152027f));
        p = _mm512_fmadd_ps(p, t, all(1.421413741f));
        p = _mm512_fmadd_ps(p, t, all(-0.284496736f));
        p = _mm512_fmadd_ps(p, t, all(0.254829592f));
        Lanes tail = _mm512_mul_ps(_mm512_mul_ps(p, t), _mm512_mul_ps(bell, all(0.5f)));
        __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
        Lanes phi = _mm512_mask_blend_ps(below, _mm512_sub_ps(one, tail), tail);
        *slope = _mm512_fmadd_ps(_mm512_mul_ps(x, all(0.39894228f)), bell, phi);
        return _mm512_mul_ps(x, phi);
    }
    Lanes u = x, of_u = one;
    if (kind == GELU_TANH) {
        Lanes square = _mm512_mul_ps(x, x);
        u = _mm512_mul_ps(x, _mm512_fmadd_ps(square, all(0.0713548162726f), all(1.59576912161f)));
        of_u = _mm512_fmadd_ps(square, all(3 * 0.0713548162726f), all(1.59576912161f));
    }
    Lanes e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), u));
    Lanes s = _mm512_div_ps(one, _mm512_add_ps(one, e));
    Lanes y = _mm512_mul_ps(x, s);
    Lanes rest = _mm512_mul_ps(_mm512_fnmadd_ps(y, s, y), of_u);
    *slope = _mm512_add_ps(s, rest);
    return y;
}

static inline void forward_row(const bf16 *x, const bf16 *up, bf16 *out, long n, long kind) {
    for (long i = 0; i < n; i += WIDTH) {
        __mmask16 mask = lanes(n - i);
        Lanes slope, y = activation(load(x + i, mask), kind, &slope);
        store(out + i, mask, up ? _mm512_mul_ps(y, load(up + i, mask)) : y);
    }
}

static inline void backward_row(const bf16 *x, const bf16 *up, const bf16 *g, bf16 *of_x, bf16 *of_up,
                                long n, long kind) {
    for (long i = 0; i < n; i += WIDTH) {
        __mmask16 mask = lanes(n - i);
        Lanes slope, y = activation(load(x + i, mask), kind, &slope), back = load(g + i, mask);
        if (up) {
            store(of_up + i, mask, _mm512_mul_ps(back, y));
            back = _mm512_mul_ps(back, load(up + i, mask));
        }
        store(of_x + i, mask, _mm512_mul_ps(back, slope));
    }
}

/* With a gate a row of x is [a, b] and becomes act(a) * b; without, act(x). `width` is out's. */
void activate(const bf16 *x, bf16 *out, long rows, long width, long kind, long gated, int threads) {
    long own = gated ? 2 * width : width;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++) {
        const bf16 *row = x + r * own, *up = gated ? row + width : 0;
        if (kind == SILU) forward_row(row, up, out + r * width, width, SILU);
        else if (kind == GELU_TANH) forward_row(row, up, out + r * width, width, GELU_TANH);
        else forward_row(row, up, out + r * width, width, GELU_ERF);
    }
}

void activate_backward(const bf16 *x, const bf16 *slopes, bf16 *back, long rows, long width, long kind,
                       long gated, int threads) {
    long own = gated ? 2 * width : width;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++) {
        const bf16 *row = x + r * own, *up = gated ? row + width : 0, *g = slopes + r * width;
        bf16 *of_x = back + r * own, *of_up = gated ? of_x + width : 0;
        if (kind == SILU) backward_row(row, up, g, of_x, of_up, width, SILU);
        else if (kind == GELU_TANH) backward_row(row, up, g, of_x, of_up, width, GELU_TANH);
        else backward_row(row, up, g, of_x, of_up, width, GELU_ERF);
    }
}

/* ---- RMSNorm ---------------------------------------------------------------------------------- */

/* w * x * s with s = 1 / sqrt(mean(x^2) + eps), which is kept. */
void rms_norm(const float *x, const float *w, bf16 *out, float *scales, long rows, long width, float eps,
              int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++) {
        const float *row = x + r * width;
        Lanes squares = _mm512_setzero_ps();
        for (long j = 0; j < width; j += WIDTH) {
            Lanes v = _mm512_maskz_loadu_ps(lanes(width - j), row + j);
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        scales[r] = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)width + eps);
        Lanes s = all(scales[r]);
        for (long j = 0; j < width; j += WIDTH) {
            __mmask16 mask = lanes(width - j);
            Lanes v = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, row + j), s);
            store(out + r * width + j, mask, _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, w + j)));
        }
    }
}

/* x's gradient s * (g w - x s^2 mean(g w x)); of w, the sum of g x s over each 64 rows in `parts`. */
void rms_norm_backward(const float *x, const float *w, const bf16 *g, const float *scales, float *back,
                       float *parts, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long part = 0; part < (rows + PART_ROWS - 1) / PART_ROWS; part++) {
        float *of_w = parts + part * width;
        memset(of_w, 0, sizeof(float) * (size_t)width);
        for (long r = part * PART_ROWS; r < rows && r < (part + 1) * PART_ROWS; r++) {
            const float *row = x + r * width;
            const bf16 *slopes = g + r * width;
            Lanes s = all(scales[r]), sum = _mm512_setzero_ps();
            for (long j = 0; j < width; j += WIDTH) {
                __mmask16 mask = lanes(width - j);
                Lanes slope = load(slopes + j, mask), v = _mm512_maskz_loadu_ps(mask, row + j);
                Lanes both = _mm512_mul_ps(slope, v), before = _mm512_maskz_loadu_ps(mask, of_w + j);
                _mm512_mask_storeu_ps(of_w + j, mask, _mm512_fmadd_ps(both, s, before));
                sum = _mm512_fmadd_ps(both, _mm512_maskz_loadu_ps(mask, w + j), sum);
            }
            float scale = scales[r], mean = _mm512_reduce_add_ps(sum) / (float)width;
            Lanes through = all(mean * scale * scale * scale);
            for (long j = 0; j < width; j += WIDTH) {
                __mmask16 mask = lanes(width - j);
                Lanes v = _mm512_maskz_loadu_ps(mask, row + j), k = _mm512_maskz_loadu_ps(mask, w + j);
                Lanes own = _mm512_mul_ps(_mm512_mul_ps(load(slopes + j, mask), k), s);
                _mm512_mask_storeu_ps(back + r * width + j, mask, _mm512_fnmadd_ps(v, through, own));
            }
        }
    }
}
