// Keys that are added to a partial result of attention. Included by attention.cpp.
//
// Vectors hold one value of many query rows, keys are read as scalars: keys need no transposing, and sums over
// keys run in the order of the text.

#pragma once

#include "kernels.h"

namespace {

constexpr int KEY_BLOCK = 64;  // keys converted to float32 and scored at a time
constexpr int PANEL = 4;       // vectors of query rows that are computed together

// c[m][n] = (ADD ? c[m][n] : 0) + sum over k of a[m * a_m + k * a_k] * b[k * b_k + n], k ascending, for M values of
// m and N vectors of n. Strides known to the compiler keep the addresses of M scalars out of the registers.
template <int M, int N, bool ADD>
inline __attribute__((always_inline)) void tile(const float* a, long a_m, long a_k, const float* b, long b_k,
                                                float* c, long c_m, int depth) {
    vec acc[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) acc[m][n] = ADD ? load(c + m * c_m + n * LANES) : vec{};
    for (int k = 0; k < depth; ++k) {
        vec row[N];
        for (int n = 0; n < N; ++n) row[n] = load(b + k * b_k + n * LANES);
        for (int m = 0; m < M; ++m) {
            const float scalar = a[m * a_m + k * a_k];
            for (int n = 0; n < N; ++n) acc[m][n] += scalar * row[n];
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(c + m * c_m + n * LANES, acc[m][n]);
}

// A[num][depth], or its transpose, times B[depth][N vectors].
template <int N, bool ADD, bool TRANSPOSED, int STRIDE>
void product(const float* a, int a_stride, const float* b, long b_k, float* c, long c_m, int num, int depth) {
    constexpr int M = REGISTERS / N >= 16 ? 16 : REGISTERS / N >= 8 ? 8 : REGISTERS / N >= 4 ? 4 : 2;
    const long stride = STRIDE ? STRIDE : a_stride, a_m = TRANSPOSED ? 1 : stride, a_k = TRANSPOSED ? stride : 1;
    int m = 0;
    for (; m + M <= num; m += M) tile<M, N, ADD>(a + m * a_m, a_m, a_k, b, b_k, c + m * c_m, c_m, depth);
    for (; m < num; ++m) tile<1, N, ADD>(a + m * a_m, a_m, a_k, b, b_k, c + m * c_m, c_m, depth);
}

// The same for any number of vectors up to PANEL.
template <bool ADD, bool TRANSPOSED, int STRIDE>
void product(int vectors, const float* a, int a_stride, const float* b, long b_k, float* c, long c_m, int num,
             int depth) {
    switch (vectors) {
        case 1: return product<1, ADD, TRANSPOSED, STRIDE>(a, a_stride, b, b_k, c, c_m, num, depth);
        case 2: return product<2, ADD, TRANSPOSED, STRIDE>(a, a_stride, b, b_k, c, c_m, num, depth);
        case 3: return product<3, ADD, TRANSPOSED, STRIDE>(a, a_stride, b, b_k, c, c_m, num, depth);
        default: return product<4, ADD, TRANSPOSED, STRIDE>(a, a_stride, b, b_k, c, c_m, num, depth);
    }
}

// Scores s become cap * tanh(s / cap). They are scaled by `scaling` later.
inline void cap_scores(float* scores, int num, float scaling, float cap) {
    for (int i = 0; i < num; i += LANES) {
        const vec x = load_upto(scores + i, num - i) * (scaling / cap);
        const vec e = exp(x < 0.0f ? 2.0f * x : -2.0f * x), tanh = (1.0f - e) / (1.0f + e) * (cap / scaling);
        store_upto(scores + i, x < 0.0f ? -tanh : tanh, num - i);
    }
}

// A partial result of attention: per query row the largest score, the sum of weights and of weighted values.
struct Part {
    float *largest, *weight, *values;  // [rows], [rows], [head_dim][rows]
};

// Turns scores of one vector of query rows into weights, in place, and scales what the part has so far to them.
// Scores lie `width` apart; `bias` is added to them, `rows` apart, or null.
inline void weigh(float* scores, int num, int width, const float* bias, int rows, int head_dim, Part part, int row) {
    const vec before = load(part.largest + row);
    vec largest = before;
    for (int j = 0; j < num; ++j) {
        vec score = load(scores + j * width);
        if (bias) {
            score += load(bias + (long)j * rows);
            store(scores + j * width, score);
        }
        largest = max(largest, score);
    }
    // A row that has seen nothing yet keeps its zeros.
    const vec base = largest == NEG_INF ? vec{} : largest, factor = exp(before - base);
    vec weight = load(part.weight + row) * factor;
    for (int j = 0; j < num; ++j) {
        const vec w = exp(load(scores + j * width) - base);
        weight += w;
        store(scores + j * width, w);
    }
    store(part.largest + row, largest);
    store(part.weight + row, weight);
    if (std::memcmp(&before, &largest, sizeof before))  // else the factor is 1
        for (int d = 0; d < head_dim; ++d) {
            float* value = part.values + (long)d * rows + row;
            store(value, load(value) * factor);
        }
}

// Adds keys to a partial result, `block` at a time: with each block the largest score may change, and with it the
// rounding. A `cap` other than 0 bounds the scores. `bias` is added to them, [count][rows], or null.
template <int HEAD_DIM, class T>
void add_keys(const T* keys, const T* values, int count, int block, const float* queries, float cap, const float* bias,
              int rows, int head_dim, Part part) {
    static thread_local std::vector<float> memory;
    memory.resize(std::max(memory.size(), size_t(block) * (head_dim + PANEL * LANES)));
    float *scratch = memory.data(), *weights = scratch + (long)block * head_dim;
    for (int first = 0; first < count; first += block) {
        const int num = std::min(block, count - first);
        for (int panel = 0; panel < rows; panel += PANEL * LANES) {
            const int width = std::min(PANEL * LANES, rows - panel), vectors = width / LANES;
            const float* k = as_floats(keys + (long)first * head_dim, num * head_dim, scratch);
            product<false, false, HEAD_DIM>(vectors, k, head_dim, queries + panel, rows, weights, width, num,
                                            head_dim);
            if (cap) cap_scores(weights, num * width, 1.0f, cap);
            for (int column = 0; column < width; column += LANES)
                weigh(weights + column, num, width, bias ? bias + (long)first * rows + panel + column : nullptr, rows,
                      head_dim, part, panel + column);
            const float* v = as_floats(values + (long)first * head_dim, num * head_dim, scratch);
            product<true, true, HEAD_DIM>(vectors, v, head_dim, weights, width, part.values + panel, rows, head_dim,
                                          num);
        }
    }
}

}  // namespace
