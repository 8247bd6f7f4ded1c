// Norms, sums and gated activations of rows.

#include "rows.h"

namespace {

constexpr int MANY_ROWS = 8;  // from here on, rows are worth more than one thread

template <class T>
void rms_norm(const T* x, Norm norm, T* out, int rows, int width) {
#pragma omp parallel for if (rows >= MANY_ROWS)
    for (int row = 0; row < rows; ++row) norm_row(x + (long)row * width, norm, out + (long)row * width, width);
}

template <class T>
void add(const T* x, const T* delta, Norm norm, float scale, T* out, int rows, int width) {
#pragma omp parallel for if (rows >= MANY_ROWS)
    for (int row = 0; row < rows; ++row) {
        const long at = (long)row * width;
        add_row(x + at, delta + at, norm, scale, out + at, width);
    }
}

template <class T>
void gate(int activation, const T* gate_up, T* out, int rows, int width) {
#pragma omp parallel for if (rows >= MANY_ROWS)
    for (int row = 0; row < rows; ++row) {
        const T* gate = gate_up + 2l * row * width;
        gate_row(activation, gate, gate + width, out + (long)row * width, width);
    }
}

}  // namespace

extern "C" {

void swiftgen_rms_norm(int is_bf16, const void* x, const Norm* norm, void* out, int rows, int width) {
    is_bf16 ? rms_norm((const bf16*)x, *norm, (bf16*)out, rows, width)
            : rms_norm((const float*)x, *norm, (float*)out, rows, width);
}

void swiftgen_add(int is_bf16, const void* x, const void* delta, const Norm* norm, float scale, void* out, int rows,
                  int width) {
    is_bf16 ? add((const bf16*)x, (const bf16*)delta, *norm, scale, (bf16*)out, rows, width)
            : add((const float*)x, (const float*)delta, *norm, scale, (float*)out, rows, width);
}

void swiftgen_gate(int is_bf16, int activation, const void* gate_up, void* out, int rows, int width) {
    is_bf16 ? gate(activation, (const bf16*)gate_up, (bf16*)out, rows, width)
            : gate(activation, (const float*)gate_up, (float*)out, rows, width);
}

}  // extern "C"
