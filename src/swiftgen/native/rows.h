// What a layer does with a row beside matrix products and attention.
//
// Every number of a row is computed by the same instructions in the same order, however many rows there are.

#pragma once

#include "kernels.h"

namespace {

template <class T>
inline float norm_factor(const T* x, float eps, int width) {
    vec squares = {};
    for (int i = 0; i < width; i += LANES) {
        const vec v = load_upto(x + i, width - i);
        squares += v * v;
    }
    return 1.0f / std::sqrt(sum(squares) / width + eps);
}

// out = RMSNorm(x), or x where there is none; `out` may be `x`.
template <class T>
inline void norm_row(const T* x, Norm norm, T* out, int width) {
    if (!norm.weight) {
        std::memmove(out, x, sizeof(T) * width);
        return;
    }
    const float factor = norm_factor(x, norm.eps, width);
    for (int i = 0; i < width; i += LANES)
        store_upto(out + i, load_upto(x + i, width - i) * factor * load_upto(norm.weight + i, width - i), width - i);
}

// out = x + scale * RMSNorm(delta), rounded once; `out` may be `x`.
template <class T>
inline void add_row(const T* x, const T* delta, Norm norm, float scale, T* out, int width) {
    const float factor = norm.weight ? scale * norm_factor(delta, norm.eps, width) : scale;
    for (int i = 0; i < width; i += LANES) {
        vec added = load_upto(delta + i, width - i) * factor;
        if (norm.weight) added *= load_upto(norm.weight + i, width - i);
        store_upto(out + i, load_upto(x + i, width - i) + added, width - i);
    }
}

// Activations of a gate, as structs.py numbers them.
enum Activation { SILU, GELU_TANH };

// out = activation(gate) * up. Both are gate * sigmoid(y), with y the gate itself or a polynomial of it.
template <class T>
inline void gate_row(int activation, const T* gate, const T* up, T* out, int width) {
    for (int i = 0; i < width; i += LANES) {
        const vec g = load_upto(gate + i, width - i);
        const vec y = activation == GELU_TANH ? g * (1.5957691216f + 0.0713548162726f * g * g) : g;  // 2 sqrt(2 / pi)
        const vec e = exp(y < 0.0f ? y : -y);  // e^-|y| keeps the exponential in range
        const vec activated = (y < 0.0f ? g * e : g) / (1.0f + e);
        store_upto(out + i, activated * load_upto(up + i, width - i), width - i);
    }
}

}  // namespace
