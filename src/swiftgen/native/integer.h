// Matrix products of 8-bit activations with weights in few bits, in integers. Included by products.cpp.
//
// Activations are rounded to 8 bits in blocks of 32 along a row, as llama.cpp does, or to 16: what is left of them, in 8
// bits as well, is multiplied like a row of its own. The sum of a block is an integer,
// which has no order, and blocks are added in the order of the row by fused multiplications: so a row gives the same
// bits beside any other rows, and on any processor.

#pragma once

#include "formats.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

inline floats fused(floats a, floats b, floats c) {  // a * b + c, rounded once, whatever a compiler makes of `*` and `+`
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    for (int i = 0; i < GROUP; i += 8) {
        const __m256 sum = _mm256_fmadd_ps(read<__m256>((float*)&a + i), read<__m256>((float*)&b + i),
                                           read<__m256>((float*)&c + i));
        std::memcpy((float*)&c + i, &sum, sizeof sum);
    }
    return c;
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
    for (int i = 0; i < GROUP; i += 4) {
        const float32x4_t sum = vfmaq_f32(read<float32x4_t>((float*)&c + i), read<float32x4_t>((float*)&a + i),
                                          read<float32x4_t>((float*)&b + i));
        std::memcpy((float*)&c + i, &sum, sizeof sum);
    }
    return c;
#else
    for (int i = 0; i < GROUP; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// Rows in 8 bits.
struct Rounded {
    int8_t* codes;    // [rows][in]
    float* scales;    // [rows][in / BLOCK]
    int32_t* sums;    // [rows][in / 16], of codes

    static int64_t bytes(int64_t rows, int64_t in) { return rows * (in + in / BLOCK * 4 + in / 16 * 4); }
    Rounded(void* memory, int64_t rows, int64_t in)
        : codes((int8_t*)memory),
          scales((float*)(codes + rows * in)),
          sums((int32_t*)(scales + rows * (in / BLOCK))) {}
};

// One row: the largest of a block becomes 127.
template <class T>
inline void round_row(const T* x, int in, int8_t* codes, float* scales, int32_t* sums) {
    for (int b = 0; b < in / BLOCK; ++b, x += BLOCK, codes += BLOCK) {
        float scratch[BLOCK];
        const float* values = as_floats(x, BLOCK, scratch);
        float largest = 0, nothing = 0;
        for (int i = 0; i < BLOCK; ++i) {
            largest = std::max(largest, std::fabs(values[i]));
            nothing += values[i] * 0.0f;  // unless one is no number, which must not be lost
        }
        const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
        scales[b] = largest / 127.0f + nothing;
        int32_t total[2] = {};
#if defined(__AVX512F__)
        for (int i = 0; i < 2; ++i) {
            const __m512i rounded = _mm512_cvtps_epi32(_mm512_loadu_ps(values + 16 * i) * _mm512_set1_ps(inverse));
            _mm_storeu_si128((__m128i*)(codes + 16 * i), _mm512_cvtsepi32_epi8(rounded));
            total[i] = _mm512_reduce_add_epi32(rounded);
        }
#else
        for (int i = 0; i < BLOCK; ++i) {
            const int code = (int)std::nearbyint(values[i] * inverse);
            codes[i] = (int8_t)code;
            total[i / 16] += code;
        }
#endif
        sums[2 * b] = total[0], sums[2 * b + 1] = total[1];
    }
}

// sums + products of codes and the four activations in `x`. Codes of 8 bits are taken with a sign, less 128, where that
// is how the processor multiplies: `takes_signs`.
#if defined(__AVX512VNNI__)

constexpr bool takes_signs(int) { return false; }
template <int BITS>
inline ints add_products(ints sums, bytes codes, int32_t x) {
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(x));
}

#elif defined(__AVX2__)

constexpr bool takes_signs(int bits) { return bits == 8; }
inline __m256i add_half(__m256i sums, __m256i codes, __m256i x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, codes, x);
#else  // pairs of at most 127 x 127, or 128 x 127, fit in 16 bits
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
#endif
}
template <int BITS>
inline ints add_products(ints sums, bytes codes, int32_t x) {
    __m256i s[2], c[2];
    std::memcpy(s, &sums, 64);
    std::memcpy(c, &codes, 64);
    for (int i = 0; i < 2; ++i) {
        __m256i factor = _mm256_set1_epi32(x);
        if (BITS == 8) {
            c[i] = _mm256_xor_si256(c[i], _mm256_set1_epi8(-128));
            factor = _mm256_sign_epi8(factor, c[i]);
            c[i] = _mm256_abs_epi8(c[i]);
        }
        s[i] = add_half(s[i], c[i], factor);
    }
    std::memcpy(&sums, s, 64);
    return sums;
}

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr bool takes_signs(int bits) { return bits == 8; }
template <int BITS>
inline ints add_products(ints sums, bytes codes, int32_t x) {
    int32x4_t s[4];
    int8x16_t c[4];
    std::memcpy(s, &sums, 64);
    std::memcpy(c, &codes, 64);
    const int8x16_t factor = vreinterpretq_s8_s32(vdupq_n_s32(x));
    for (int i = 0; i < 4; ++i)
        s[i] = vdotq_s32(s[i], BITS == 8 ? veorq_s8(c[i], vdupq_n_s8(-128)) : c[i], factor);
    std::memcpy(&sums, s, 64);
    return sums;
}

#else

constexpr bool takes_signs(int) { return false; }
template <int BITS>
inline ints add_products(ints sums, bytes codes, int32_t x) {
    int8_t factor[VECTOR];
    std::memcpy(factor, &x, sizeof x);
    for (int f = 0; f < GROUP; ++f)
        for (int i = 0; i < VECTOR; ++i) sums[f] += codes[f * VECTOR + i] * factor[i];
    return sums;
}

#endif

// A group of features times R rows from `row` on.
template <class F, int R>
__attribute__((noinline)) void integer_sums(const uint8_t* group, const Rounded& x, int in, int row, floats out[R]) {
    constexpr int PER_SCALE = VECTORS / F::SCALES, ZERO = takes_signs(F::BITS) ? F::ZERO - 128 : F::ZERO;
    const int num_blocks = in / BLOCK;
    const int8_t* codes_of = x.codes + (long)row * in;
    const float* scales_of = x.scales + (long)row * num_blocks;
    const int32_t* sums_of = x.sums + 2l * row * num_blocks;
    floats total[R] = {};
    for (int b = 0; b < num_blocks; ++b) {
        const uint8_t* unit = group + (long)(b / F::BLOCKS) * F::UNIT_BYTES;
        const auto factors = F::factors(unit, b % F::BLOCKS);
        bytes codes[VECTORS];
        F::codes(unit, b % F::BLOCKS, codes);
        F::fetch_ahead(unit, b % F::BLOCKS);
        for (int r = 0; r < R; ++r) {
            const floats scale = floats{} + scales_of[(long)r * num_blocks + b];
            const int32_t* sums = sums_of + 2 * ((long)r * num_blocks + b);
            for (int s = 0; s < F::SCALES; ++s) {
                const int32_t all = F::SCALES == 1 ? sums[0] + sums[1] : sums[s];
                ints products = ints{} - ZERO * all;
                for (int v = s * PER_SCALE; v < (s + 1) * PER_SCALE; ++v)
                    products = add_products<F::BITS>(products, codes[v],
                                                     read<int32_t>(codes_of + (long)r * in + b * BLOCK + v * VECTOR));
                total[r] = fused(__builtin_convertvector(products, floats) * scale, factors.scale[s], total[r]);
            }
            if (F::HAS_MINIMA)
                total[r] = fused(floats{} + float(sums[0] + sums[1]) * scale[0], factors.minimum, total[r]);
        }
    }
    for (int r = 0; r < R; ++r) out[r] = total[r];
}

}  // namespace
