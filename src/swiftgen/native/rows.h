// What a layer does with a row beside matrix products and attention.
//
// Every number of a row is computed by the same instructions in the same order, however many rows there are.

#pragma once

#include "kernels.h"

namespace {

// x becomes x + delta, rounded, if there is one; out = RMSNorm(x) * weight.
template <class T>
inline void norm_row(const T* x, const T* delta, T* total, const T* weight, float eps, T* out, int width) {
    vec squares = {};
    for (int i = 0; i < width; i += LANES) {
        vec v = load_upto(x + i, width - i);
        if (delta) {
            v += load_upto(delta + i, width - i);
            store_upto(total + i, v, width - i);
            v = load_upto(total + i, width - i);  // rounded
        }
        squares += v * v;
    }
    const T* in = delta ? total : x;
    const float factor = 1.0f / std::sqrt(sum(squares) / width + eps);
    for (int i = 0; i < width; i += LANES)
        store_upto(out + i, load_upto(in + i, width - i) * factor * load_upto(weight + i, width - i), width - i);
}

template <class T>
inline void silu_mul(const T* gate, const T* up, T* out, int width) {
    for (int i = 0; i < width; i += LANES) {
        const vec g = load_upto(gate + i, width - i);
        const vec e = exp(g < 0.0f ? g : -g);  // e^-|x| keeps the exponential in range
        const vec silu = (g < 0.0f ? g * e : g) / (1.0f + e);
        store_upto(out + i, silu * load_upto(up + i, width - i), width - i);
    }
}

}  // namespace
