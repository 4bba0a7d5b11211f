/* Products with weights of 8 and 4 bits on a CPU: float activations are rounded to 8 bits here, by groups of columns.
 *
 * Weights are unsigned, activations signed, since that is the pair that a CPU multiplies four at a time (AVX512-VNNI).
 * Sixteen outputs lie beside each other: a vector holds four consecutive columns of each. Elsewhere the same layout is
 * walked by plain loops.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include <immintrin.h>
#define HAS_VNNI 1
#endif

#define OUTS 16   /* outputs of a panel */
#define ROWS 6    /* activations' rows a weight is read for at once */
#define SERIAL_WORK 16384
#define PARAMS static inline __attribute__((always_inline)) void

/* Round rows of x to int8 by groups: x is about scale * value. `sums` are the values' sums over groups. */
void shoal_round_groups(const float *x, int8_t *values, float *scales, int32_t *sums, int64_t num_rows, int64_t width,
                        int64_t group) {
    int64_t groups = width / group;
#pragma omp parallel for if (num_rows * width > SERIAL_WORK)
    for (int64_t piece = 0; piece < num_rows * groups; piece++) {
        const float *from = x + piece * group;
        int8_t *to = values + piece * group;
        float most = 0.0f;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < group; i++) most = fmaxf(most, fabsf(from[i]));
        float inverse = most > 0.0f ? 127.0f / most : 0.0f;
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < group; i++) {
            int32_t value = (int32_t)rintf(from[i] * inverse);
            to[i] = (int8_t)value;
            sum += value;
        }
        scales[piece] = most / 127.0f;
        sums[piece] = sum;
    }
}

typedef struct {
    const int8_t *values; /* [num_rows, width] */
    const float *scales;  /* [num_rows, groups] */
    const int32_t *sums;
    const uint8_t *weight;   /* of this panel */
    const float *row_scales; /* [OUTS]: of 8-bit weights */
    const uint16_t *scales16, *offsets16; /* [groups, OUTS] float16: of 4-bit weights */
    const float *bias;       /* [OUTS] or null */
    float *out;              /* at the panel's first output of row 0 */
    int64_t width, group, num_out, outs; /* outs: how many of the panel's outputs there are */
} Panel;

#ifdef HAS_VNNI
static inline int32_t four(const int8_t *values) {
    int32_t word;
    memcpy(&word, values, 4);
    return word;
}

/* 8-bit weights hold w + 128, which the start value takes off again. */
PARAMS eight_bits(const Panel *p, int64_t first, const int rows) {
    int64_t groups = p->width / p->group;
    __m512 total[ROWS];
    for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_ps();
    const uint8_t *weight = p->weight;
    for (int64_t g = 0; g < groups; g++) {
        __m512i acc[ROWS];
        for (int r = 0; r < rows; r++) acc[r] = _mm512_set1_epi32(-128 * p->sums[(first + r) * groups + g]);
        for (int64_t i = 0; i < p->group; i += 4, weight += 64) {
            __m512i w = _mm512_loadu_si512(weight);
            for (int r = 0; r < rows; r++)
                acc[r] = _mm512_dpbusd_epi32(
                    acc[r], w, _mm512_set1_epi32(four(p->values + (first + r) * p->width + g * p->group + i)));
        }
        for (int r = 0; r < rows; r++)
            total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r]),
                                       _mm512_set1_ps(p->scales[(first + r) * groups + g]), total[r]);
    }
    __mmask16 mask = (__mmask16)((1u << p->outs) - 1);
    __m512 scale = _mm512_loadu_ps(p->row_scales);
    __m512 bias = p->bias ? _mm512_maskz_loadu_ps(mask, p->bias) : _mm512_setzero_ps();
    for (int r = 0; r < rows; r++)
        _mm512_mask_storeu_ps(p->out + (first + r) * p->num_out, mask, _mm512_fmadd_ps(total[r], scale, bias));
}

/* 4-bit weights are scale * code + offset by groups; a byte holds a code (low) and the one half a group on. */
PARAMS four_bits(const Panel *p, int64_t first, const int rows) {
    int64_t groups = p->width / p->group, half = p->group / 2;
    const __m512i low = _mm512_set1_epi8(15);
    __m512 total[ROWS];
    for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_ps();
    const uint8_t *weight = p->weight;
    for (int64_t g = 0; g < groups; g++) {
        __m512i acc[ROWS];
        for (int r = 0; r < rows; r++) acc[r] = _mm512_setzero_si512();
        for (int64_t i = 0; i < half; i += 4, weight += 64) {
            __m512i both = _mm512_loadu_si512(weight);
            __m512i near = _mm512_and_si512(both, low);
            __m512i far = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            for (int r = 0; r < rows; r++) {
                const int8_t *x = p->values + (first + r) * p->width + g * p->group + i;
                acc[r] = _mm512_dpbusd_epi32(acc[r], near, _mm512_set1_epi32(four(x)));
                acc[r] = _mm512_dpbusd_epi32(acc[r], far, _mm512_set1_epi32(four(x + half)));
            }
        }
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p->scales16 + g * OUTS)));
        __m512 offset = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p->offsets16 + g * OUTS)));
        for (int r = 0; r < rows; r++) {
            int64_t at = (first + r) * groups + g;
            __m512 part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r]), scale,
                                          _mm512_mul_ps(offset, _mm512_set1_ps((float)p->sums[at])));
            total[r] = _mm512_fmadd_ps(part, _mm512_set1_ps(p->scales[at]), total[r]);
        }
    }
    __mmask16 mask = (__mmask16)((1u << p->outs) - 1);
    __m512 bias = p->bias ? _mm512_maskz_loadu_ps(mask, p->bias) : _mm512_setzero_ps();
    for (int r = 0; r < rows; r++)
        _mm512_mask_storeu_ps(p->out + (first + r) * p->num_out, mask, _mm512_add_ps(total[r], bias));
}
#else
static inline float half_float(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits >> 15) << 31, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    float value;
    if (exponent == 0) value = ldexpf((float)mantissa, -24);
    else value = ldexpf((float)(mantissa | 1024), (int)exponent - 25);
    return sign ? -value : value;
}

PARAMS eight_bits(const Panel *p, int64_t first, const int rows) {
    int64_t groups = p->width / p->group;
    for (int r = 0; r < rows; r++) {
        const int8_t *x = p->values + (first + r) * p->width;
        float total[OUTS] = {0};
        for (int64_t g = 0; g < groups; g++) {
            int32_t acc[OUTS] = {0};
            for (int64_t i = g * p->group; i < (g + 1) * p->group; i++)
                for (int o = 0; o < OUTS; o++) acc[o] += (int32_t)x[i] * (p->weight[(i / 4 * OUTS + o) * 4 + i % 4] - 128);
            for (int o = 0; o < OUTS; o++) total[o] += (float)acc[o] * p->scales[(first + r) * groups + g];
        }
        for (int o = 0; o < p->outs; o++)
            p->out[(first + r) * p->num_out + o] = total[o] * p->row_scales[o] + (p->bias ? p->bias[o] : 0.0f);
    }
}

PARAMS four_bits(const Panel *p, int64_t first, const int rows) {
    int64_t groups = p->width / p->group, half = p->group / 2;
    for (int r = 0; r < rows; r++) {
        float total[OUTS] = {0};
        for (int64_t g = 0; g < groups; g++) {
            int64_t at = (first + r) * groups + g;
            const int8_t *x = p->values + (first + r) * p->width + g * p->group;
            const uint8_t *weight = p->weight + g * half * OUTS;
            int32_t acc[OUTS] = {0};
            for (int64_t i = 0; i < half; i++)
                for (int o = 0; o < OUTS; o++) {
                    uint8_t both = weight[(i / 4 * OUTS + o) * 4 + i % 4];
                    acc[o] += (int32_t)x[i] * (both & 15) + (int32_t)x[i + half] * (both >> 4);
                }
            for (int o = 0; o < OUTS; o++) {
                float scale = half_float(p->scales16[g * OUTS + o]), offset = half_float(p->offsets16[g * OUTS + o]);
                total[o] += p->scales[at] * ((float)acc[o] * scale + (float)p->sums[at] * offset);
            }
        }
        for (int o = 0; o < p->outs; o++)
            p->out[(first + r) * p->num_out + o] = total[o] + (p->bias ? p->bias[o] : 0.0f);
    }
}
#endif

#define WALK(kind)                                                                       \
    do {                                                                                 \
        int64_t row = 0;                                                                 \
        for (; row + ROWS <= num_rows; row += ROWS) kind(&panel, row, ROWS);             \
        switch (num_rows - row) {                                                        \
            case 5: kind(&panel, row, 5); break;                                         \
            case 4: kind(&panel, row, 4); break;                                         \
            case 3: kind(&panel, row, 3); break;                                         \
            case 2: kind(&panel, row, 2); break;                                         \
            case 1: kind(&panel, row, 1); break;                                         \
        }                                                                                \
    } while (0)

/* out [num_rows, num_out] = x W^T + bias. Each row's result is its own: it does not depend on how many there are. */
void shoal_narrow_linear(const int8_t *values, const float *scales, const int32_t *sums, const uint8_t *weight,
                         const float *row_scales, const uint16_t *scales16, const uint16_t *offsets16, const float *bias,
                         float *out, int64_t num_rows, int64_t width, int64_t group, int64_t num_out) {
    int64_t panels = (num_out + OUTS - 1) / OUTS, groups = width / group;
    int is_4bit = scales16 != 0;
#pragma omp parallel for schedule(static)
    for (int64_t index = 0; index < panels; index++) {
        int64_t start = index * OUTS;
        Panel panel = {
            values, scales, sums,
            weight + index * OUTS * (is_4bit ? width / 2 : width),
            is_4bit ? 0 : row_scales + start,
            is_4bit ? scales16 + index * groups * OUTS : 0,
            is_4bit ? offsets16 + index * groups * OUTS : 0,
            bias ? bias + start : 0,
            out + start, width, group, num_out, num_out - start < OUTS ? num_out - start : OUTS,
        };
        if (is_4bit) WALK(four_bits);
        else WALK(eight_bits);
    }
}
