// Vectors and number formats that the kernels share; nothing here leaves the file that includes it.

#pragma once

#include "structs.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 24;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 12;
#else
constexpr int LANES = 4, REGISTERS = 12;
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));

struct bf16 {
    uint16_t bits;
};

namespace {

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

inline vec splat(float x) { return x - vec{}; }

inline vec load(const float* p) {
    vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline vec load(const bf16* p) {
    hvec h;
    std::memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
}
inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16* p, vec v) {  // rounds to nearest even
    const uvec bits = (uvec)v;
    const hvec h = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, hvec);
    std::memcpy(p, &h, sizeof h);
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// Pairs of bfloat16, [16][2]: the numbers of two vectors by turns, each rounded to nearest even.
inline __m512i pairs_by_turns(__m512 first, __m512 second) {
    alignas(64) static const uint16_t ORDER[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}
#endif

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The first n numbers of a vector: a row need not be a multiple of LANES wide.
template <class T>
inline vec load_part(const T* p, int n) {
    T padded[LANES] = {};
    std::memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
template <class T>
inline void store_part(T* p, vec v, int n) {
    T padded[LANES];
    store(padded, v);
    std::memcpy(p, padded, n * sizeof(T));
}
template <class T>
inline vec load_upto(const T* p, int n) { return n >= LANES ? load(p) : load_part(p, n); }
template <class T>
inline void store_upto(T* p, vec v, int n) { n >= LANES ? store(p, v) : store_part(p, v, n); }

inline vec max(vec a, vec b) { return a > b ? a : b; }

// e^x for x <= 88; 0 below -87 (float32 has no normal numbers there). Error below 2 units in the last place.
template <class V>
inline V exp(V x) {
    using Ints = decltype(x < x);
    const V clamped = x > -87.0f ? x : V{} - 87.0f;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    V n = clamped * 1.44269504f + shift;
    const Ints exponent = (Ints)n << 23;
    n -= shift;
    const V r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    V p = V{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return x < -87.0f ? V{} : (V)((Ints)p + exponent);
}

// Numbers in float32: where they are, or in `scratch`.
inline const float* as_floats(const float* p, int, float*) { return p; }
inline const float* as_floats(const bf16* p, int count, float* scratch) {
    for (int i = 0; i < count; i += LANES) store_upto(scratch + i, load_upto(p + i, count - i), count - i);
    return scratch;
}

inline float sum(vec v) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += v[i];
    return total;
}

}  // namespace

extern "C" {

// By the threads of a parallel region, which wait for each other at the end. qkv is
// [num_rows][heads + 2 kv heads][head_dim], attended [num_rows][heads][head_dim].
void swiftgen_attend_together(const Pass* pass, const Heads* heads, int layer, const void* qkv, void* attended);

// Only what comes before: queries after RoPE to `pass->queries`, keys and values to the cache.
void swiftgen_rotate(const Pass* pass, const Heads* heads, int layer, const void* qkv);

// See `norm_row`, `add_row` and `gate_row` of rows.h; gate_up is [rows][2 * width], the gate first.
void swiftgen_rms_norm(int is_bf16, const void* x, const Norm* norm, void* out, int rows, int width);
void swiftgen_add(int is_bf16, const void* x, const void* delta, const Norm* norm, float scale, void* out, int rows,
                  int width);
void swiftgen_gate(int is_bf16, int activation, const void* gate_up, void* out, int rows, int width);

}  // extern "C"
