/* The CPU's own kernels: float32, contiguous, the same results as the torch references up to rounding.
 *
 * Compiled on the user's machine by native.py where there is a C compiler. Loops are written so that the compiler
 * vectorises them; threads are OpenMP's, from the library that torch has loaded.
 * The KV cache is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

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

/* Sixteen floats; where registers are smaller the compiler takes several. Unaligned, and it may alias floats. */
typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
#define LANES 16

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

/* What one call of `attend` works on: some KV heads of one row. */
typedef struct {
    const float *q;        /* [num_heads, group, head_dim] */
    const float *kv_cache; /* at the first of the heads, block 0 */
    const int32_t *table;
    float *out;       /* as q */
    float *highest;   /* [num_heads * group] scratch, as `total` */
    float *total;
    int64_t context, num_heads, group, block_size, block_stride, value_offset;
    float scale;
} Work;

/* Scores of `count` keys against one query into `scores`; returns their maximum, no less than `best`. */
static inline __attribute__((always_inline)) float score_keys(const float *query, const float *keys, float *scores,
                                                              int64_t count, int64_t head_dim, float scale,
                                                              float best) {
    const Lanes *parts = (const Lanes *)query;
    for (int64_t t = 0; t < count; t++) {
        const Lanes *key = (const Lanes *)(keys + t * head_dim);
        Lanes products = parts[0] * key[0];
        for (int64_t i = 1; i < head_dim / LANES; i++) products += parts[i] * key[i];
        float product = 0.0f;
        for (int64_t i = 0; i < LANES; i++) product += products[i];
        scores[t] = product * scale;
    }
    for (int64_t t = 0; t < count; t++) best = scores[t] > best ? scores[t] : best;
    return best;
}

/* Softmax over the context, block by block, rescaled when a higher score comes (Milakov & Gimelshein 2018). */
static inline __attribute__((always_inline)) void attend(const Work *work, int64_t head_dim) {
    float scores[MAX_BLOCK_SIZE];
    int64_t num_queries = work->num_heads * work->group, block_size = work->block_size;
    int64_t piece = block_size * head_dim;
    for (int64_t g = 0; g < num_queries; g++) {
        work->highest[g] = -3.0e38f;
        work->total[g] = 0.0f;
    }
    memset(work->out, 0, sizeof(float) * num_queries * head_dim);
    int64_t num_blocks = (work->context + block_size - 1) / block_size;
    for (int64_t index = 0; index < num_blocks; index++) {
        const float *keys = work->kv_cache + work->table[index] * work->block_stride;
        /* Blocks lie anywhere: the hardware does not see the next one coming. */
        int64_t next_index = index + 1 < num_blocks ? index + 1 : index;
        const float *next = work->kv_cache + work->table[next_index] * work->block_stride;
        int64_t left = work->context - index * block_size, count = left < block_size ? left : block_size;
        for (int64_t head = 0; head < work->num_heads; head++, keys += piece, next += piece) {
            const float *values = keys + work->value_offset;
            for (int64_t g = head * work->group; g < (head + 1) * work->group; g++) {
                Lanes *out = (Lanes *)(work->out + g * head_dim), acc[MAX_HEAD_DIM / LANES];
                for (int64_t i = 0; i < head_dim / LANES; i++) acc[i] = out[i];
                float old = work->highest[g];
                float best = score_keys(work->q + g * head_dim, keys, scores, count, head_dim, work->scale, old);
                if (best > old) {
                    float fade = exp_inline(old - best);
                    work->highest[g] = best;
                    work->total[g] *= fade;
                    for (int64_t i = 0; i < head_dim / LANES; i++) acc[i] *= fade;
                }
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int64_t t = 0; t < count; t++) {
                    scores[t] = exp_inline(scores[t] - best);
                    sum += scores[t];
                }
                work->total[g] += sum;
                /* Each query fetches its share of the next block ahead, so that no burst of fetches stalls. */
                int64_t ahead = (g % work->group) * piece / work->group / 16 * 16;
                int64_t share = piece / work->group / count;
                for (int64_t t = 0; t < count; t++) {
                    const Lanes *value = (const Lanes *)(values + t * head_dim);
                    for (int64_t i = 0; i < head_dim / LANES; i++) acc[i] += scores[t] * value[i];
                    for (int64_t i = 0; i < share; i += 16) {
                        __builtin_prefetch(next + ahead + t * share + i, 0, 2);
                        __builtin_prefetch(next + work->value_offset + ahead + t * share + i, 0, 2);
                    }
                }
                for (int64_t i = 0; i < head_dim / LANES; i++) out[i] = acc[i];
            }
        }
    }
    for (int64_t g = 0; g < num_queries; g++) {
        float inverse = work->total[g] > 0.0f ? 1.0f / work->total[g] : 0.0f;
        for (int64_t i = 0; i < head_dim; i++) work->out[g * head_dim + i] *= inverse;
    }
}

/* `scratch` holds two floats a query head and row; head_dim is a multiple of LANES. */
void shoal_paged_decode_attention(const float *q, const float *kv_cache, const int32_t *block_tables,
                                  const int32_t *context_lens, float *out, float *scratch, float scale,
                                  int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                  int64_t block_size, int64_t num_layers, int64_t layer, int64_t table_stride) {
    int64_t group = num_heads / num_kv_heads, piece = block_size * head_dim;
    /* All heads of a block lie together: take them together where the rows alone keep the threads busy. */
    int64_t heads = num_rows >= 8 ? num_kv_heads : 1, parts = num_kv_heads / heads;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t item = 0; item < num_rows * parts; item++) {
        int64_t row = item / parts, kv_head = item % parts * heads;
        int64_t first = row * num_heads + kv_head * group;
        Work work = {
            .q = q + first * head_dim,
            .kv_cache = kv_cache + (layer * 2 * num_kv_heads + kv_head) * piece,
            .table = block_tables + row * table_stride,
            .out = out + first * head_dim,
            .highest = scratch + 2 * first,
            .total = scratch + 2 * first + heads * group,
            .context = context_lens[row],
            .num_heads = heads,
            .group = group,
            .block_size = block_size,
            .block_stride = num_layers * 2 * num_kv_heads * piece,
            .value_offset = num_kv_heads * piece,
            .scale = scale,
        };
        /* Known sizes let the compiler keep a head in registers. */
        switch (head_dim) {
        case 64: attend(&work, 64); break;
        case 80: attend(&work, 80); break;
        case 96: attend(&work, 96); break;
        case 128: attend(&work, 128); break;
        case 256: attend(&work, 256); break;
        default: attend(&work, head_dim); break;
        }
    }
}
