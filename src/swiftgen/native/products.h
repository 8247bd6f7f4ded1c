// Matrix products with weights in few bits, for the threads of a parallel region.

#pragma once

#include "kernels.h"
#include "structs.h"

constexpr int FEW_ROWS = 8;  // up to here each thread prepares all rows for itself, which is quicker than to wait
constexpr int PROMPT_ROWS = 128;  // from here on rows are those of a prompt, which agree with no other pass

// Room for `prepare`, for rows of the widest product.
int64_t prepared_bytes(int64_t rows, int64_t in);

// What a product reads of rows x[rows][in], into `memory`: all of it by this thread, or by all together if there are many.
void prepare(const Product& w, int is_bf16, const void* x, int rows, void* memory);

// Features `begin` to `end`, multiples of 16, of the product: out[rows][w.out], float32 if it is wide.
void multiply(const Product& w, int is_bf16, const void* x, const void* prepared, void* out, int rows, int begin, int end);

// Rows of a weight as they are multiplied with: float32 out[num][in].
void unpack(int type, const uint8_t* packed, const int64_t* rows, int64_t num, int64_t in, float* out);

// A row of an embedding, packed or dense, times `scale`: out[width].
void embed(int is_bf16, const Weights* packed, const void* dense, int64_t token, float scale, int width, void* out);

extern "C" {

int64_t swiftgen_prepared_bytes(int rows, int in, int num_threads);

// out[rows][w.out] = x[rows][w.in] times the weights, plus bias. `memory` has room for `swiftgen_prepared_bytes`.
void swiftgen_multiply(int is_bf16, const void* x, const Product* w, void* out, int rows, int num_threads, void* memory);

}  // extern "C"
