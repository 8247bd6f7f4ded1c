// Keys of a prefix in bfloat16, multiplied in pairs: one instruction takes two dimensions of a key, or two keys of a
// dimension, for 8 or 16 query rows. Included by attention.cpp.
//
// Weights are rounded to bfloat16, as the values are. Processors with matrix tiles use those (key_tiles.h): their products
// of pairs are slower than those of float32.

#pragma once

#include "keys.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(__AMX_BF16__)
#define HAS_PAIRS
#include <immintrin.h>

namespace {

constexpr int HALF = LANES / 2;  // half a vector of query rows costs half as much, and plain decoding has few

typedef float half_vec __attribute__((vector_size(4 * HALF)));

template <class V>
inline V load_as(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
inline void store_as(void* p, V v) { std::memcpy(p, &v, sizeof v); }

// sum + products of pairs that lie in `a`, one for each lane, with the one in `b`.
inline vec add_pairs(vec sum, const uint32_t* a, uint32_t b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_set1_epi32(b));
}
inline half_vec add_pairs(half_vec sum, const uint32_t* a, uint32_t b) {
    const __m256i pairs = _mm256_loadu_si256((const __m256i*)a);
    return (half_vec)_mm256_dpbf16_ps((__m256)sum, (__m256bh)pairs, (__m256bh)_mm256_set1_epi32(b));
}

// Where the next block of keys and values lies. It is fetched while this one is computed, a line at a time: many at
// once would have to wait for each other.
struct Ahead {
    const uint32_t *keys, *values;
};

// c[m][n] = (ADD ? c[m][n] : 0) + sum over k of pairs a[m * a_m + k * a_k] * b[k * b_k + n], k ascending, for M values
// of m, FULL vectors of n, and half a vector more if HAS_HALF. `ahead` is for those that do not add.
template <int M, int FULL, bool HAS_HALF, bool ADD>
inline __attribute__((always_inline)) void pair_tile(const uint32_t* a, long a_m, long a_k, const uint32_t* b, long b_k,
                                                     float* c, long c_m, int depth, Ahead ahead) {
    vec full[M][FULL + 1];
    half_vec half[M];
    for (int m = 0; m < M; ++m) {
        for (int n = 0; n < FULL; ++n) full[m][n] = ADD ? load(c + m * c_m + n * LANES) : vec{};
        half[m] = ADD && HAS_HALF ? load_as<half_vec>(c + m * c_m + FULL * LANES) : half_vec{};
    }
    for (int k = 0; k < depth; ++k) {
        if (!ADD) {
            __builtin_prefetch(ahead.keys + k * M);
            __builtin_prefetch(ahead.values + k * M);
        }
        for (int m = 0; m < M; ++m) {
            const uint32_t pair = load_as<uint32_t>(a + m * a_m + k * a_k);
            for (int n = 0; n < FULL; ++n) full[m][n] = add_pairs(full[m][n], b + k * b_k + n * LANES, pair);
            if (HAS_HALF) half[m] = add_pairs(half[m], b + k * b_k + FULL * LANES, pair);
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int n = 0; n < FULL; ++n) store(c + m * c_m + n * LANES, full[m][n]);
        if (HAS_HALF) store_as(c + m * c_m + FULL * LANES, half[m]);
    }
}

template <int FULL, bool HAS_HALF, bool ADD>
void pair_product(const uint32_t* a, long a_m, long a_k, const uint32_t* b, long b_k, float* c, long c_m, int num,
                  int depth, Ahead ahead) {
    constexpr int N = FULL + HAS_HALF, M = N == 1 ? 16 : N <= 3 ? 8 : 4;
    const auto soon = [&](int m) { return Ahead{ahead.keys + m * a_m, ahead.values + m * a_m}; };
    int m = 0;
    for (; m + M <= num; m += M)
        pair_tile<M, FULL, HAS_HALF, ADD>(a + m * a_m, a_m, a_k, b, b_k, c + m * c_m, c_m, depth, soon(m));
    for (; m < num; ++m)
        pair_tile<1, FULL, HAS_HALF, ADD>(a + m * a_m, a_m, a_k, b, b_k, c + m * c_m, c_m, depth, soon(m));
}

// The same for any number of half vectors up to 2 * PANEL.
template <bool ADD>
void pair_product(int halves, const uint32_t* a, long a_m, long a_k, const uint32_t* b, long b_k, float* c, long c_m,
                  int num, int depth, Ahead ahead = {}) {
    const auto run = [&](auto product) { product(a, a_m, a_k, b, b_k, c, c_m, num, depth, ahead); };
    switch (halves) {
        case 1: return run(pair_product<0, true, ADD>);
        case 2: return run(pair_product<1, false, ADD>);
        case 3: return run(pair_product<1, true, ADD>);
        case 4: return run(pair_product<2, false, ADD>);
        case 5: return run(pair_product<2, true, ADD>);
        case 6: return run(pair_product<3, false, ADD>);
        case 7: return run(pair_product<3, true, ADD>);
        default: return run(pair_product<4, false, ADD>);
    }
}

// Turns scores, `width` apart, into weights, pairs of keys `width` apart, for one vector V of query rows; scales what
// the part has so far to them.
template <class V>
void weigh_pairs(const float* scores, int num, int width, float scaling, int rows, int head_dim, Part part, int row,
                 uint32_t* pairs) {
    using Bits = decltype(V{} < V{});
    V largest = load_as<V>(scores);
    for (int j = 1; j < num; ++j) {
        const V score = load_as<V>(scores + j * width);
        largest = largest > score ? largest : score;
    }
    const V before = load_as<V>(part.largest + row), scaled = largest * scaling, base = before > scaled ? before : scaled;
    const V factor = exp(before - base);
    V weight = load_as<V>(part.weight + row) * factor;
    for (int j = 0; j < num; j += 2) {
        Bits rounded[2] = {};
        for (int i = 0; i < std::min(2, num - j); ++i) {
            const Bits bits = (Bits)exp(load_as<V>(scores + (j + i) * width) * scaling - base);
            rounded[i] = (bits + 0x7fff + ((bits >> 16) & 1)) & ~0xffff;  // to nearest even; weights are positive
            weight += (V)rounded[i];
        }
        store_as(pairs + j / 2 * width, rounded[1] | (rounded[0] >> 16));
    }
    store_as(part.largest + row, base);
    store_as(part.weight + row, weight);
    if (std::memcmp(&before, &base, sizeof before))  // else the factor is 1
        for (int d = 0; d < head_dim; ++d) {
            float* value = part.values + (long)d * rows + row;
            store_as(value, load_as<V>(value) * factor);
        }
}

// Values of two keys after each other, dimension by dimension: `out` is [num / 2 rounded up][head_dim] pairs.
inline void pair_up(const bf16* values, int num, int head_dim, uint32_t* out) {
    alignas(64) uint16_t order[32];  // the first 16 of one key and the first 16 of the other, by turns
    for (int i = 0; i < 32; ++i) order[i] = i / 2 + i % 2 * 32;
    const __m512i low = _mm512_load_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int j = 0; j < num; j += 2, out += head_dim) {
        const bf16 *first = values + (long)j * head_dim, *second = first + head_dim;
        const bool has_second = j + 1 < num;
        int d = 0;
        for (; has_second && d + 32 <= head_dim; d += 32) {
            const __m512i x = _mm512_loadu_si512(first + d), y = _mm512_loadu_si512(second + d);
            _mm512_storeu_si512(out + d, _mm512_permutex2var_epi16(x, low, y));
            _mm512_storeu_si512(out + d + 16, _mm512_permutex2var_epi16(x, high, y));
        }
        for (; d < head_dim; ++d) out[d] = first[d].bits | (has_second ? uint32_t(second[d].bits) << 16 : 0);
    }
}

// Adds keys to a partial result, KEY_BLOCK at a time. `queries` are pairs of dimensions, [head_dim / 2][rows]; of the
// rows, `live` are computed, rounded up to half a vector.
void add_key_pairs(const bf16* keys, const bf16* values, int count, const uint32_t* queries, float scaling, float cap,
                   int live, int rows, int head_dim, Part part) {
    static thread_local std::vector<uint32_t> memory;
    memory.resize(std::max(memory.size(), size_t(KEY_BLOCK) / 2 * (head_dim + 3 * PANEL * LANES)));
    uint32_t *paired = memory.data(), *weights = paired + KEY_BLOCK / 2 * head_dim;
    float* scores = (float*)(weights + KEY_BLOCK / 2 * PANEL * LANES);
    for (int first = 0; first < count; first += KEY_BLOCK) {
        const int num = std::min(KEY_BLOCK, count - first);
        const auto pairs_at = [&](const bf16* p, int j) { return (const uint32_t*)(p + (long)j * head_dim); };
        const Ahead ahead = {pairs_at(keys, first + KEY_BLOCK), pairs_at(values, first + KEY_BLOCK)};
        pair_up(values + (long)first * head_dim, num, head_dim, paired);
        for (int panel = 0; panel < live; panel += PANEL * LANES) {
            const int halves = std::min(2 * PANEL, (live - panel + HALF - 1) / HALF), width = halves * HALF;
            pair_product<false>(halves, pairs_at(keys, first), head_dim / 2, 1, queries + panel, rows, scores, width,
                                num, head_dim / 2, ahead);
            if (cap) cap_scores(scores, num * width, scaling, cap);
            int column = 0;
            for (; column + LANES <= width; column += LANES)
                weigh_pairs<vec>(scores + column, num, width, scaling, rows, head_dim, part, panel + column,
                                 weights + column);
            if (column < width)
                weigh_pairs<half_vec>(scores + column, num, width, scaling, rows, head_dim, part, panel + column,
                                      weights + column);
            pair_product<true>(halves, paired, 1, head_dim, weights, width, part.values + panel, rows, head_dim,
                               (num + 1) / 2);
        }
    }
}

}  // namespace

#endif
