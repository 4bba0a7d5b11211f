/* The CPU's own kernels: float32, contiguous, the same results as the torch references up to rounding.
 *
 * Compiled on the user's machine by native.py where there is a C compiler. Loops are written so that the compiler
 * vectorises them; threads are OpenMP's, from the library that torch has loaded.
 * The KV cache is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MAX_GROUP 64
#define MAX_HEAD_DIM 256
#define MAX_BLOCK_SIZE 64
/* Below so many floats of work, waking other threads takes longer than the work. */
#define SERIAL_WORK 16384

/* e^x to 2 ulp for x in [-87, 88], by Cephes' polynomial; beyond, the nearest end's value. */
static inline float exp_inline(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } power;
    power.i = ((int32_t)n + 127) << 23;
    return p * power.f;
}

static inline float norm_scale(const float *x, int64_t size, float eps) {
    float square = 0.0f;
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < size; i++) square += x[i] * x[i];
    return 1.0f / sqrtf(square / (float)size + eps);
}

/* out = rms_norm(x); with a residual: residual += x, out = rms_norm(residual). */
void shoal_rms_norm(const float *x, float *residual, const float *weight, float *out, int64_t num_tokens,
                    int64_t hidden, float eps) {
#pragma omp parallel for if (num_tokens * hidden > SERIAL_WORK)
    for (int64_t token = 0; token < num_tokens; token++) {
        const float *row = x + token * hidden;
        if (residual) {
            float *sum = residual + token * hidden;
            for (int64_t i = 0; i < hidden; i++) sum[i] += row[i];
            row = sum;
        }
        float scale = norm_scale(row, hidden, eps);
        float *target = out + token * hidden;
        for (int64_t i = 0; i < hidden; i++) target[i] = row[i] * scale * weight[i];
    }
}

void shoal_silu_mul(const float *gate_up, float *out, int64_t num_tokens, int64_t width) {
#pragma omp parallel for if (num_tokens * width > SERIAL_WORK)
    for (int64_t token = 0; token < num_tokens; token++) {
        const float *gate = gate_up + token * 2 * width, *up = gate + width;
        float *target = out + token * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) target[i] = gate[i] / (1.0f + exp_inline(-gate[i])) * up[i];
    }
}

void shoal_rope_kv_write(const float *qkv, const int64_t *positions, const int64_t *slots, const float *cos_sin,
                         float *kv_cache, float *q, const float *q_norm, const float *k_norm, float eps,
                         int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                         int64_t block_size, int64_t num_layers, int64_t layer) {
    int64_t all_heads = num_heads + 2 * num_kv_heads, half = head_dim / 2;
#pragma omp parallel for if (num_tokens * all_heads * head_dim > SERIAL_WORK)
    for (int64_t token = 0; token < num_tokens; token++) {
        const float *cosines = cos_sin + positions[token] * head_dim, *sines = cosines + half;
        int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
        float *cached = kv_cache + ((block * num_layers + layer) * 2 * num_kv_heads * block_size + offset) * head_dim;
        for (int64_t head = 0; head < all_heads; head++) {
            const float *source = qkv + (token * all_heads + head) * head_dim;
            float *target = head < num_heads ? q + (token * num_heads + head) * head_dim
                                             : cached + (head - num_heads) * block_size * head_dim;
            if (head >= num_heads + num_kv_heads) {
                memcpy(target, source, sizeof(float) * head_dim);
                continue;
            }
            float normed[MAX_HEAD_DIM];
            if (q_norm) {
                const float *weight = head < num_heads ? q_norm : k_norm;
                float scale = norm_scale(source, head_dim, eps);
                for (int64_t i = 0; i < head_dim; i++) normed[i] = source[i] * scale * weight[i];
                source = normed;
            }
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                target[i] = source[i] * cosines[i] - source[half + i] * sines[i];
                target[half + i] = source[half + i] * cosines[i] + source[i] * sines[i];
            }
        }
    }
}

/* One KV head of one row: softmax over its context block by block, rescaled when a higher score comes. */
static inline __attribute__((always_inline)) void attend(
    const float *q, const float *kv_cache, const int32_t *table, float *out, int64_t context, float scale,
    int64_t group, int64_t head_dim, int64_t block_size, int64_t block_stride, int64_t value_offset) {
    float highest[MAX_GROUP], total[MAX_GROUP], scores[MAX_BLOCK_SIZE];
    for (int64_t g = 0; g < group; g++) {
        highest[g] = -3.0e38f;
        total[g] = 0.0f;
    }
    memset(out, 0, sizeof(float) * group * head_dim);
    int64_t num_blocks = (context + block_size - 1) / block_size;
    for (int64_t index = 0; index < num_blocks; index++) {
        const float *keys = kv_cache + table[index] * block_stride, *values = keys + value_offset;
        int64_t count = context - index * block_size;
        count = count < block_size ? count : block_size;
        if (index + 1 < num_blocks) {
            /* Blocks lie anywhere, and a head's piece is about a page: the hardware does not see the next one coming. */
            const float *next = kv_cache + table[index + 1] * block_stride;
            for (int64_t i = 0; i < block_size * head_dim; i += 16) {
                __builtin_prefetch(next + i);
                __builtin_prefetch(next + value_offset + i);
            }
        }
        for (int64_t g = 0; g < group; g++) {
            const float *query = q + g * head_dim;
            float *acc = out + g * head_dim;
            float best = highest[g];
            for (int64_t t = 0; t < count; t++) {
                const float *key = keys + t * head_dim;
                float product = 0.0f;
#pragma omp simd reduction(+ : product)
                for (int64_t i = 0; i < head_dim; i++) product += query[i] * key[i];
                scores[t] = product * scale;
                best = scores[t] > best ? scores[t] : best;
            }
            if (best > highest[g]) {
                float fade = exp_inline(highest[g] - best);
                highest[g] = best;
                total[g] *= fade;
#pragma omp simd
                for (int64_t i = 0; i < head_dim; i++) acc[i] *= fade;
            }
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t t = 0; t < count; t++) {
                scores[t] = exp_inline(scores[t] - best);
                sum += scores[t];
            }
            total[g] += sum;
            for (int64_t t = 0; t < count; t++) {
                const float *value = values + t * head_dim;
                float weight = scores[t];
#pragma omp simd
                for (int64_t i = 0; i < head_dim; i++) acc[i] += weight * value[i];
            }
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float inverse = total[g] > 0.0f ? 1.0f / total[g] : 0.0f;
        for (int64_t i = 0; i < head_dim; i++) out[g * head_dim + i] *= inverse;
    }
}

void shoal_paged_decode_attention(const float *q, const float *kv_cache, const int32_t *block_tables,
                                  const int32_t *context_lens, float *out, float scale, int64_t num_rows,
                                  int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
                                  int64_t num_layers, int64_t layer, int64_t table_stride) {
    int64_t group = num_heads / num_kv_heads, piece = block_size * head_dim;
    int64_t block_stride = num_layers * 2 * num_kv_heads * piece;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t item = 0; item < num_rows * num_kv_heads; item++) {
        int64_t row = item / num_kv_heads, kv_head = item % num_kv_heads;
        const float *cached = kv_cache + (layer * 2 * num_kv_heads + kv_head) * piece;
        int64_t first = (row * num_heads + kv_head * group) * head_dim;
        const int32_t *table = block_tables + row * table_stride;
        int64_t context = context_lens[row];
        /* Known sizes let the compiler keep a head in registers. */
        if (head_dim == 64)
            attend(q + first, cached, table, out + first, context, scale, group, 64, block_size, block_stride,
                   num_kv_heads * piece);
        else if (head_dim == 128)
            attend(q + first, cached, table, out + first, context, scale, group, 128, block_size, block_stride,
                   num_kv_heads * piece);
        else
            attend(q + first, cached, table, out + first, context, scale, group, head_dim, block_size, block_stride,
                   num_kv_heads * piece);
    }
}
