// Keys of a prefix in bfloat16, multiplied by matrix tiles: 16 keys by 16 query rows at a time. Included by attention.cpp.
//
// Weights are rounded to bfloat16, as the values are. A column of a tile depends on no other: query rows do not either.

#pragma once

#include "keys.h"
#include "tiles.h"

#ifdef HAS_TILES
#include <immintrin.h>

namespace {

constexpr int TILE_KEYS = 128, PAIRED = 2 * TILE;  // keys of a block, and those that one product of weights takes

// 16 x 16 numbers of 32 bits, transposed.
inline void transpose(__m512i rows[TILE]) {
    struct Orders {
        alignas(64) int32_t low[4][TILE], high[4][TILE];
    };
    static const Orders orders = [] {
        Orders o;
        for (int i = 0; i < 4; ++i)
            for (int lane = 0, step = 1 << i; lane < TILE; ++lane) {
                o.low[i][lane] = lane & step ? TILE + lane - step : lane;
                o.high[i][lane] = lane & step ? TILE + lane : lane + step;
            }
        return o;
    }();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512i low = _mm512_load_si512(orders.low[i]), high = _mm512_load_si512(orders.high[i]);
#pragma GCC unroll 16
        for (int row = 0; row < TILE; ++row) {
            const int other = row | 1 << i;
            if (row == other) continue;
            const __m512i a = rows[row], b = rows[other];
            rows[row] = _mm512_permutex2var_epi32(a, low, b);
            rows[other] = _mm512_permutex2var_epi32(a, high, b);
        }
    }
}

// Products of `num` keys, a multiple of 32, with 16 query rows, which lie in pairs of dimensions: scores [num][16].
inline void tile_scores(const bf16* keys, int num, const uint32_t* queries, int rows, int head_dim, float* scores) {
    for (int j = 0; j < num; j += PAIRED) {
        const bf16* at = keys + (long)j * head_dim;
        _tile_zero(0);
        _tile_zero(1);
        for (int d = 0; d < head_dim; d += PAIRED) {
            _tile_loadd(5, queries + (long)d / 2 * rows, 4l * rows);
            _tile_loadd(4, at + d, 2l * head_dim);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(3, at + (long)TILE * head_dim + d, 2l * head_dim);
            _tile_dpbf16ps(1, 3, 5);
        }
        _tile_stored(0, scores + j * TILE, 64);
        _tile_stored(1, scores + (j + TILE) * TILE, 64);
    }
}

// Turns scores of `num` keys into weights, [num / 32][16 query rows][32 keys]; scales what `sums` [16 query rows][head_dim]
// has so far to them. Scores behind the first `live` count nothing. Meanwhile, the next block is fetched.
inline void tile_weights(float* scores, int live, int num, float scaling, int head_dim, float* largest, float* weight,
                         float* sums, __m512i* weights, const bf16* next_keys, const bf16* next_values) {
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    for (int j = live; j < num; ++j) store(scores + j * TILE, splat(NEG_INF));
    vec most = load(scores);
    for (int j = 1; j < live; ++j) most = max(most, load(scores + j * TILE));
    const vec before = load(largest), base = max(before, most * scaling), factor = exp(before - base);
    vec total = load(weight) * factor;
    if (std::memcmp(&before, &base, sizeof base))  // else the factor is 1
        for (int row = 0; row < TILE; ++row)
            for (int d = 0; d < head_dim; d += LANES) {
                float* at = sums + row * head_dim + d;
                store(at, load(at) * factor[row]);
            }
    for (int j = 0; j < num; j += PAIRED, weights += TILE) {
        __m512i pairs[TILE];
        for (int i = 0; i < TILE; ++i) {
            for (long d = (j + 2l * i) * head_dim; d < (j + 2l * i + 2) * head_dim; d += PAIRED) {
                __builtin_prefetch(next_keys + d);
                __builtin_prefetch(next_values + d);
            }
            const float* at = scores + (j + 2 * i) * TILE;
            const vec first = exp(load(at) * scaling - base), second = exp(load(at + TILE) * scaling - base);
            pairs[i] = pairs_by_turns((__m512)first, (__m512)second);
            total += (vec)_mm512_slli_epi32(pairs[i], 16) + (vec)_mm512_and_si512(pairs[i], upper);
        }
        transpose(pairs);
        std::memcpy(weights, pairs, sizeof pairs);
    }
    store(largest, base);
    store(weight, total);
}

// Values of two keys by turns, [num / 2][head_dim] pairs: of 32 dimensions, 0-3, 8-11, 16-19, 24-27, and then the others.
inline void pair_values(const bf16* values, int num, int head_dim, __m512i* pairs) {
    for (int j = 0; j < num; j += 2)
        for (int d = 0; d < head_dim; d += PAIRED) {
            const bf16* at = values + (long)j * head_dim + d;
            const __m512i first = _mm512_loadu_si512(at), second = _mm512_loadu_si512(at + head_dim);
            *pairs++ = _mm512_unpacklo_epi16(first, second);
            *pairs++ = _mm512_unpackhi_epi16(first, second);
        }
}

// Adds weights times values to sums [16 query rows][head_dim].
inline void add_tiles(const __m512i* weights, const __m512i* pairs, int num, int head_dim, float* sums) {
    const int columns = head_dim / TILE;
    for (int c = 0; c < columns; c += MAX_TILES) {
        const bool is_full = columns - c >= MAX_TILES;  // else two are left
        float* at = sums + c * TILE;
        _tile_loadd(0, at, 4l * head_dim);
        _tile_loadd(1, at + TILE, 4l * head_dim);
        if (is_full) {
            _tile_loadd(2, at + 2 * TILE, 4l * head_dim);
            _tile_loadd(3, at + 3 * TILE, 4l * head_dim);
        }
        for (int j = 0; j < num; j += PAIRED) {
            const __m512i* values = pairs + (long)j / 2 * columns + c;
            _tile_loadd(4, weights + j / 2, 64);
            _tile_loadd(5, values, 64l * columns);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(5, values + 1, 64l * columns);
            _tile_dpbf16ps(1, 4, 5);
            if (is_full) {
                _tile_loadd(5, values + 2, 64l * columns);
                _tile_dpbf16ps(2, 4, 5);
                _tile_loadd(5, values + 3, 64l * columns);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, at, 4l * head_dim);
        _tile_stored(1, at + TILE, 4l * head_dim);
        if (is_full) {
            _tile_stored(2, at + 2 * TILE, 4l * head_dim);
            _tile_stored(3, at + 3 * TILE, 4l * head_dim);
        }
    }
}

inline bool can_tile(int head_dim) { return head_dim % PAIRED == 0 && has_tiles(); }

// Adds keys to a partial result that is empty. `queries` are pairs of dimensions, [head_dim / 2][rows]; of the rows,
// `live` are computed, rounded up to 16.
void add_key_tiles(const bf16* keys, const bf16* values, int count, const uint32_t* queries, float scaling, float cap,
                   int live, int rows, int head_dim, Part part) {
    struct Line {
        __m512i bits;
    };
    static thread_local std::vector<Line> memory;
    const int padded = (live + TILE - 1) / TILE * TILE, vectors = head_dim / TILE;
    memory.resize(std::max(memory.size(), size_t(TILE_KEYS) * (vectors + 3) + (long)padded * vectors));
    __m512i *pairs = &memory.data()->bits, *rest = pairs + TILE_KEYS / 2 * vectors, *weights = rest + TILE_KEYS / 2 * vectors;
    float *scores = (float*)(weights + TILE_KEYS / 2), *sums = scores + TILE_KEYS * TILE;
    std::memset(sums, 0, sizeof(float) * padded * head_dim);
    const Tiles tiles;
    for (int first = 0; first < count; first += TILE_KEYS) {
        const int num = std::min(TILE_KEYS, count - first), whole = (num + PAIRED - 1) / PAIRED * PAIRED;
        const bf16 *k = keys + (long)first * head_dim, *v = values + (long)first * head_dim;
        const long ahead = first + TILE_KEYS < count ? TILE_KEYS * head_dim : 0;
        const bf16 *next_keys = k + ahead, *next_values = v + ahead;
        const auto with_zeros = [&](const bf16* p) {  // what lies behind the last key may be nobody's memory
            std::memset(rest, 0, sizeof(bf16) * whole * head_dim);
            return (const bf16*)std::memcpy(rest, p, sizeof(bf16) * num * head_dim);
        };
        pair_values(num < whole ? with_zeros(v) : v, whole, head_dim, pairs);
        if (num < whole) k = with_zeros(k);
        for (int row = 0; row < live; row += TILE) {
            tile_scores(k, whole, queries + row, rows, head_dim, scores);
            if (cap) cap_scores(scores, whole * TILE, scaling, cap);
            tile_weights(scores, num, whole, scaling, head_dim, part.largest + row, part.weight + row,
                         sums + row * head_dim, weights, next_keys, next_values);
            add_tiles(weights, pairs, whole, head_dim, sums + row * head_dim);
        }
    }
    for (int row = 0; row < live; row += TILE)
        for (int d = 0; d < head_dim; d += TILE) {
            __m512i columns[TILE];
            for (int i = 0; i < TILE; ++i) columns[i] = _mm512_loadu_si512(sums + (row + i) * head_dim + d);
            transpose(columns);
            for (int i = 0; i < TILE; ++i) {
                const int at = d / PAIRED * PAIRED + i / 4 * 8 + i % 4 + d % PAIRED / 4;  // as `pair_values` has them
                _mm512_storeu_si512(part.values + (long)at * rows + row, columns[i]);
            }
        }
}

}  // namespace

#endif
