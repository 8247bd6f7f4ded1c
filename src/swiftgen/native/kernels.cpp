// RMSNorm and the gated activation of a pass. Built and called by native.py.
//
// Every number of a row is computed by the same instructions in the same order, however many rows there are.

#include "kernels.h"

namespace {

constexpr int MANY_ROWS = 8;  // from here on, rows are worth more than one thread

// x becomes x + delta (if there is one); out = RMSNorm(x) * weight.
template <class T>
void rms_norm(const T* x, const T* delta, T* total, const T* weight, float eps, T* out, int rows, int width) {
#pragma omp parallel for if (rows >= MANY_ROWS)
    for (int row = 0; row < rows; ++row) {
        const long begin = (long)row * width;
        vec squares = {};
        for (int i = 0; i < width; i += LANES) {
            vec v = load_upto(x + begin + i, width - i);
            if (delta) {
                v += load_upto(delta + begin + i, width - i);
                store_upto(total + begin + i, v, width - i);
                v = load_upto(total + begin + i, width - i);  // rounded
            }
            squares += v * v;
        }
        const T* in = (delta ? total : x) + begin;
        const float factor = 1.0f / std::sqrt(sum(squares) / width + eps);
        for (int i = 0; i < width; i += LANES) {
            const vec scaled = load_upto(in + i, width - i) * factor * load_upto(weight + i, width - i);
            store_upto(out + begin + i, scaled, width - i);
        }
    }
}

template <class T>
void silu_mul(const T* gate_up, T* out, int rows, int width) {
#pragma omp parallel for if (rows >= MANY_ROWS)
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < width; i += LANES) {
            const T* gates = gate_up + 2l * row * width;
            const vec gate = load_upto(gates + i, width - i), up = load_upto(gates + width + i, width - i);
            // e^-|x| keeps the exponential in range.
            const vec e = exp(gate < 0.0f ? gate : -gate);
            const vec silu = (gate < 0.0f ? gate * e : gate) / (1.0f + e);
            store_upto(out + (long)row * width + i, silu * up, width - i);
        }
}

}  // namespace

extern "C" {

void swiftgen_rms_norm(int is_bf16, const void* x, const void* delta, void* total, const void* weight, float eps,
                       void* out, int rows, int width) {
    if (is_bf16)
        rms_norm((const bf16*)x, (const bf16*)delta, (bf16*)total, (const bf16*)weight, eps, (bf16*)out, rows, width);
    else
        rms_norm((const float*)x, (const float*)delta, (float*)total, (const float*)weight, eps, (float*)out, rows,
                 width);
}

void swiftgen_silu_mul(int is_bf16, const void* gate_up, void* out, int rows, int width) {
    is_bf16 ? silu_mul((const bf16*)gate_up, (bf16*)out, rows, width)
            : silu_mul((const float*)gate_up, (float*)out, rows, width);
}

}  // extern "C"
