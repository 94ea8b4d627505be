/* Softmax of the output head and of attention, and attention's tokens by groups of examples. */

#include "lanes.h"

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
