// RMSNorm and the gated activation of rows.

#include "rows.h"

namespace {

constexpr int MANY_ROWS = 8;  // from here on, rows are worth more than one thread

template <class T>
void rms_norm(const T* x, const T* delta, T* total, const T* weight, float eps, T* out, int rows, int width) {
#pragma omp parallel for if (rows >= MANY_ROWS)
    for (int row = 0; row < rows; ++row) {
        const long at = (long)row * width;
        norm_row(x + at, delta ? delta + at : nullptr, total + at, weight, eps, out + at, width);
    }
}

template <class T>
void silu_mul(const T* gate_up, T* out, int rows, int width) {
#pragma omp parallel for if (rows >= MANY_ROWS)
    for (int row = 0; row < rows; ++row) {
        const T* gate = gate_up + 2l * row * width;
        silu_mul(gate, gate + width, out + (long)row * width, width);
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
