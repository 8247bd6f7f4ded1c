// Attention of draft passes, whose one row need agree with no other. Included by attention.cpp.
//
// Vectors run along the dimensions of a head instead of query rows (keys.h), of which a draft has only as many as a KV
// head has query heads: that is half the time for three of them, and twice the time for sixteen.

#pragma once

#include <type_traits>

#include "keys.h"

namespace {

// The sums of as many vectors as there are lanes.
inline vec sums_of(const vec* v) {
#if defined(__AVX512F__)
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i)
        a[i] = _mm512_unpacklo_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]) +
               _mm512_unpackhi_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]);
    for (int i = 0; i < 4; ++i) {
        const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
    for (int i = 0; i < 2; ++i)
        c[i] = _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88) +
               _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd);
    return (vec)(_mm512_shuffle_f32x4(c[0], c[1], 0x88) + _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
#elif defined(__AVX2__)
    __m256 a[4], b[2];
    for (int i = 0; i < 4; ++i) a[i] = _mm256_hadd_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
    for (int i = 0; i < 2; ++i) b[i] = _mm256_hadd_ps(a[2 * i], a[2 * i + 1]);
    return (vec)(_mm256_permute2f128_ps(b[0], b[1], 0x20) + _mm256_permute2f128_ps(b[0], b[1], 0x31));
#else
    vec out;
    for (int i = 0; i < LANES; ++i) out[i] = sum(v[i]);
    return out;
#endif
}

// scores[R], `stride` apart: R rows of queries times LANES keys. HEAD_DIM is 0 where the compiler does not know it.
template <int R, int HEAD_DIM, class T>
inline void score(const float* queries, const T* keys, int head_dim, float* scores, int stride) {
    const int d = HEAD_DIM ? HEAD_DIM : head_dim;
    vec partial[R][LANES];
    for (int j = 0; j < LANES; ++j) {
        vec total[R] = {};
        for (int i = 0; i < d; i += LANES) {
            const vec key = HEAD_DIM ? load(keys + (long)j * d + i) : load_upto(keys + (long)j * d + i, d - i);
            for (int r = 0; r < R; ++r)
                total[r] += (HEAD_DIM ? load(queries + r * d + i) : load_upto(queries + r * d + i, d - i)) * key;
        }
        for (int r = 0; r < R; ++r) partial[r][j] = total[r];
    }
    for (int r = 0; r < R; ++r) store(scores + r * stride, sums_of(partial[r]));
}

// Adds R rows of weights, `stride` apart, times `num` values to out[R][head_dim].
template <int R, int HEAD_DIM, class T>
inline void add_values(const float* weights, int stride, const T* values, int num, int head_dim, float* out) {
    constexpr int CHUNK = HEAD_DIM ? std::min(HEAD_DIM, 4 * LANES) : LANES, VECTORS = CHUNK / LANES;
    const int d = HEAD_DIM ? HEAD_DIM : head_dim;
    for (int i = 0; i < d; i += CHUNK) {
        vec total[R][VECTORS];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < VECTORS; ++c)
                total[r][c] = HEAD_DIM ? load(out + r * d + i + c * LANES) : load_upto(out + r * d + i, d - i);
        for (int j = 0; j < num; ++j)
            for (int c = 0; c < VECTORS; ++c) {
                const T* at = values + (long)j * d + i + c * LANES;
                const vec value = HEAD_DIM ? load(at) : load_upto(at, d - i);
                for (int r = 0; r < R; ++r) total[r][c] += weights[r * stride + j] * value;
            }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < VECTORS; ++c)
                HEAD_DIM ? store(out + r * d + i + c * LANES, total[r][c]) : store_upto(out + r * d + i, total[r][c], d - i);
    }
}

// Adds `num` keys, at most KEY_BLOCK, to a partial result of R rows. `largest` and `weight` are [R], `values` [R][head_dim].
template <int R, int HEAD_DIM, class T>
void add_block(const T* keys, const T* values, int num, const float* queries, int head_dim, float cap, float* largest,
               float* weight, float* out) {
    alignas(64) float scores[R * KEY_BLOCK];
    int j = 0;
    for (; j + LANES <= num; j += LANES)
        score<R, HEAD_DIM>(queries, keys + (long)j * head_dim, head_dim, scores + j, KEY_BLOCK);
    if (j < num) {  // what lies behind the last key may be nobody's memory
        T padded[LANES * 512];
        std::memset(padded, 0, sizeof(T) * LANES * head_dim);
        std::memcpy(padded, keys + (long)j * head_dim, sizeof(T) * (num - j) * head_dim);
        score<R, HEAD_DIM>(queries, padded, head_dim, scores + j, KEY_BLOCK);
    }
    for (int r = 0; r < R; ++r) {
        float* own = scores + r * KEY_BLOCK;
        if (cap) cap_scores(own, num, 1.0f, cap);
        for (int i = num; i % LANES; ++i) own[i] = NEG_INF;
        vec most = splat(largest[r]), sums = {};
        for (int i = 0; i < num; i += LANES) most = max(most, load(own + i));
        float base = most[0];
        for (int i = 1; i < LANES; ++i) base = std::max(base, most[i]);
        for (int i = 0; i < num; i += LANES) {
            const vec weights = exp(load(own + i) - base);
            store(own + i, weights);
            sums += weights;
        }
        const float factor = exp(splat(largest[r] - base))[0];
        weight[r] = weight[r] * factor + sum(sums);
        for (int i = 0; factor != 1.0f && i < head_dim; ++i) out[r * head_dim + i] *= factor;
        largest[r] = base;
    }
    add_values<R, HEAD_DIM>(scores, KEY_BLOCK, values, num, head_dim, out);
}

// The same for any number of rows and of keys.
template <int HEAD_DIM, class T>
void add_keys_by_rows(const T* keys, const T* values, int count, const float* queries, int rows, int head_dim, float cap,
                      float* largest, float* weight, float* out) {
    for (int first = 0; first < count; first += KEY_BLOCK) {
        const int num = std::min(KEY_BLOCK, count - first);
        const T *k = keys + (long)first * head_dim, *v = values + (long)first * head_dim;
        int row = 0;
        const auto take = [&](auto number) {
            for (; row + number() <= rows; row += number())
                add_block<decltype(number)::value, HEAD_DIM>(k, v, num, queries + row * head_dim, head_dim, cap, largest + row, weight + row,
                                    out + row * head_dim);
        };
        if (LANES == 16) take(std::integral_constant<int, 6>{});
        take(std::integral_constant<int, 3>{});
        take(std::integral_constant<int, 1>{});
    }
}

}  // namespace
