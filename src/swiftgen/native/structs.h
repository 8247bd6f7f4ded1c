// What Python hands over, field by field (structs.py); structs.cpp tells it where each field lies.

#pragma once

#include <cstdint>

// One pass over `num_rows` rows. The last `num_rows` keys of the tail are the pass's own.
struct Pass {
    int32_t is_bf16, num_threads, num_rows, num_heads, num_kv_heads, head_dim, num_prefix, num_tail;
    int32_t is_draft;  // whether it is one row that sees all keys and need agree with no other
    void *prefix_keys, *prefix_values, *tail_keys, *tail_values;  // of the first layer
    void* queries;  // out: [layers][kv heads][group][num_rows][head_dim], after RoPE
    int64_t prefix_stride, tail_stride;              // from one KV head to the next, in elements
    int64_t prefix_layer_stride, tail_layer_stride;  // from one layer to the next
    const float *cos, *signed_sin;                   // [num_rows][head_dim]
    const float* bias;                               // [num_tail][padded rows]: 0 where a row sees a key, else -inf
    float* workspace;
};

// What is special in the attention of a layer.
struct Heads {
    const void *q_norm, *k_norm;  // weights of RMSNorms over a head, or null
    float norm_eps, scaling;
};

// Some output features of a matrix product, in one of the formats of formats.h.
struct Weights {
    int32_t type, out;    // number of the format, a multiple of 16
    const uint8_t* data;  // [out / 16][in / unit][bytes of a unit]
};

// A matrix product: the parts of its weight, one below the other.
struct Product {
    int32_t in, out, num_parts;
    int32_t activation_bytes;  // that an activation is rounded to: 1, or 2 (an 8-bit rest of it); 0 if it is not
    int32_t is_wide;           // whether results are float32 in a model of bfloat16 too
    const Weights* parts;
    const void* bias;  // [out] in the dtype of the model, or null
};

// One pre-norm decoder layer.
struct DecoderLayer {
    const void *input_norm, *mlp_norm;  // weights
    float input_eps, mlp_eps;
    Heads heads;
    const Product *qkv, *out, *gate_up, *down;
};

// A decoder: the target, or the target as it drafts.
struct Model {
    const DecoderLayer* layers;
    const Weights* packed_embedding;  // or else
    const void* embedding;            // [vocab][hidden]
    const void* norm;                 // weight of the last RMSNorm
    const Product* lm_head;
    int32_t num_layers, hidden;
    float eps, embedding_scale;
};

// Recurrent draft heads with the parts of the target they read.
struct Cell {
    const void *state_norm, *token_norm, *post_norm;  // weights of RMSNorms
    const Weights* packed_embedding;                  // or else
    const void* embedding;                            // [vocab][hidden]
    const Product *gate_up, *down, *lm_head;
    float eps, embedding_scale;
};
