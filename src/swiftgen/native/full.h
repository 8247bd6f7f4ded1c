// Matrix products with the weights of the unpacked model. Included by products.cpp.
//
// A weight is what the unpacked model has: code * scale + minimum, rounded to the model's dtype. Only the memory it is
// read from is smaller. Each number of the result is one sum over the inputs in their order.

#pragma once

#include "formats.h"
#include "tiles.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define HAS_BF16_PRODUCTS
#endif

namespace {

// The weights of four consecutive inputs.
template <class F>
inline void weights_of(bytes codes, floats scale, floats minimum, floats out[VECTOR]) {
    for (int i = 0; i < VECTOR; ++i) {
        const ints code = (ints)((uints)codes >> (8 * i)) & 255;
        const floats value = __builtin_convertvector(code - F::ZERO, floats) * scale;
        out[i] = F::HAS_MINIMA ? value + minimum : value;  // the product is exact, so it is rounded once
    }
}

inline floats rounded(floats x, const float*) { return x; }
inline floats rounded(floats x, const bf16*) {
    const uints bits = (uints)x;
    return (floats)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
}

// A group of features times R rows of `x`, [R][in].
template <class F, int R, class T>
__attribute__((noinline)) void full_sums(const uint8_t* group, const float* x, int in, floats out[R]) {
    floats total[R] = {};
    for (int b = 0; b < in / BLOCK; ++b) {
        const uint8_t* unit = group + (long)(b / F::BLOCKS) * F::UNIT_BYTES;
        const auto factors = F::factors(unit, b % F::BLOCKS);
        bytes codes[VECTORS];
        F::codes(unit, b % F::BLOCKS, codes);
        for (int v = 0; v < VECTORS; ++v) {
            floats weights[VECTOR];
            weights_of<F>(codes[v], factors.scale[v * F::SCALES / VECTORS], factors.minimum, weights);
            for (int i = 0; i < VECTOR; ++i)
                for (int r = 0; r < R; ++r)
                    total[r] += rounded(weights[i], (T*)nullptr) * x[(long)r * in + b * BLOCK + v * VECTOR + i];
        }
    }
    for (int r = 0; r < R; ++r) out[r] = total[r];
}

#ifdef HAS_BF16_PRODUCTS

// The weights of a block in pairs of inputs: [16 pairs][16 features][2].
template <class F>
inline void pairs_of(const uint8_t* unit, int block, __m512i out[BLOCK / 2]) {
    F::fetch_ahead(unit, block);
    const auto factors = F::factors(unit, block);
    bytes codes[VECTORS];
    F::codes(unit, block, codes);
    for (int v = 0; v < VECTORS; ++v) {
        floats w[VECTOR];
        weights_of<F>(codes[v], factors.scale[v * F::SCALES / VECTORS], factors.minimum, w);
        for (int i = 0; i < VECTOR; i += 2)
            out[(v * VECTOR + i) / 2] = pairs_by_turns((__m512)w[i], (__m512)w[i + 1]);
    }
}

template <class F, int R, class T>
__attribute__((noinline)) void full_sums(const uint8_t* group, const bf16* x, int in, floats out[R]) {
    floats total[R] = {};
    for (int b = 0; b < in / BLOCK; ++b) {
        __m512i pairs[BLOCK / 2];
        pairs_of<F>(group + (long)(b / F::BLOCKS) * F::UNIT_BYTES, b % F::BLOCKS, pairs);
        for (int i = 0; i < BLOCK / 2; ++i)
            for (int r = 0; r < R; ++r) {
                const int32_t both = read<int32_t>(x + (long)r * in + b * BLOCK + 2 * i);
                total[r] = (floats)_mm512_dpbf16_ps((__m512)total[r], (__m512bh)pairs[i],
                                                    (__m512bh)_mm512_set1_epi32(both));
            }
    }
    for (int r = 0; r < R; ++r) out[r] = total[r];
}

#endif

#ifdef HAS_TILES

// A group of features times `num` tiles of rows: tiles 0 to 3 are sums [rows][16 features], 4 is weights [16 pairs][16
// features], 5 is values [rows][16 pairs]; `out` is [num][16 rows][16 features].
template <class F>
__attribute__((noinline)) void tile_sums(const uint8_t* group, const bf16* x, int in, int num, float* out) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    alignas(64) __m512i pairs[2][BLOCK / 2];
    const long stride = 2l * in, next = (long)TILE * in;
    for (int b = 0; b < in / BLOCK; ++b, x += BLOCK) {
        pairs_of<F>(group + (long)(b / F::BLOCKS) * F::UNIT_BYTES, b % F::BLOCKS, pairs[b % 2]);
        _tile_loadd(4, pairs[b % 2], 64);
        _tile_loadd(5, x, stride);
        _tile_dpbf16ps(0, 5, 4);
        if (num > 1) {
            _tile_loadd(5, x + next, stride);
            _tile_dpbf16ps(1, 5, 4);
        }
        if (num > 2) {
            _tile_loadd(5, x + 2 * next, stride);
            _tile_dpbf16ps(2, 5, 4);
        }
        if (num > 3) {
            _tile_loadd(5, x + 3 * next, stride);
            _tile_dpbf16ps(3, 5, 4);
        }
    }
    _tile_stored(0, out, 64);
    if (num > 1) _tile_stored(1, out + TILE * GROUP, 64);
    if (num > 2) _tile_stored(2, out + 2 * TILE * GROUP, 64);
    if (num > 3) _tile_stored(3, out + 3 * TILE * GROUP, 64);
}

#endif

}  // namespace
