/* Activations, RMSNorm, rotary positions and sums, each in one pass over memory. */

#include "lanes.h"

enum { SILU = 0, GELU_TANH = 1, GELU_ERF = 2 };

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

/* total += part; the first part sets it. */
void add(float *total, const bf16 *part, long n, long first, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long block = 0; block < n; block += 4096)
        for (long i = block; i < n && i < block + 4096; i += WIDTH) {
            __mmask16 mask = lanes(n - i);
            Lanes value = load(part + i, mask);
            if (!first) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, total + i));
            _mm512_mask_storeu_ps(total + i, mask, value);
        }
}

/* The sum of each column over every 64 rows, in `parts`. */
void column_sums(const bf16 *values, float *parts, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long part = 0; part < (rows + PART_ROWS - 1) / PART_ROWS; part++) {
        float *sums = parts + part * width;
        long end = rows < (part + 1) * PART_ROWS ? rows : (part + 1) * PART_ROWS;
        for (long j = 0; j < width; j += WIDTH) {
            __mmask16 mask = lanes(width - j);
            Lanes sum = _mm512_setzero_ps();
            for (long r = part * PART_ROWS; r < end; r++)
                sum = _mm512_add_ps(sum, load(values + r * width + j, mask));
            _mm512_mask_storeu_ps(sums + j, mask, sum);
        }
    }
}
