// What Python hands over, field by field (structs.py); structs.cpp tells it where each field lies.

#pragma once

#include <cstdint>

// What a pass is to layers that are alike in what they see and in how positions turn their heads.
//
// Of the keys before the tail, all rows see those of the prefix, and some rows those at the edge of a sliding window,
// which lie before it.
struct LayerKind {
    const float *cos, *signed_sin;  // [num_rows][rotary_dim]
    const float* bias;              // [num_edge + num_tail][padded rows]: 0 where a row sees a key, else -inf
    void *edge_keys, *edge_values, *prefix_keys, *prefix_values, *tail_keys, *tail_values;  // of its first layer
    int64_t prefix_stride, tail_stride;              // from one KV head to the next, in elements; edge as prefix
    int64_t prefix_layer_stride, tail_layer_stride;  // from one of its layers to the next
    int32_t num_edge, num_prefix;
};

// The kind of a layer, and which of the layers that share a cache it is.
struct LayerPlace {
    int32_t kind, index;
};

// One pass over `num_rows` rows. The last `num_rows` keys of the tail are the pass's own.
struct Pass {
    int32_t is_bf16, num_threads, num_rows, num_heads, num_kv_heads, head_dim, num_tail, num_kinds;
    int32_t is_draft;    // whether it is one row that sees all keys and need agree with no other
    int32_t rotary_dim;  // dimensions of a head that RoPE turns, the first ones
    const LayerKind* kinds;
    const LayerPlace* places;  // [layers]
    void* queries;             // out: [layers][kv heads][group][num_rows][head_dim], after RoPE
    float* workspace;
};

// An RMSNorm; there is none without a weight.
struct Norm {
    const float* weight;
    float eps;
};

// What is special in the attention of a layer.
struct Heads {
    Norm q_norm, k_norm;  // over each head
    float scaling, cap;   // a score s becomes cap * tanh(s / cap), unless cap is 0
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

// One decoder layer: attention and a gated MLP, each added to the hidden state.
struct DecoderLayer {
    Norm input_norm, attention_norm, mlp_norm, output_norm;  // before and behind attention, before and behind the MLP
    Norm q_norm, k_norm;                                     // over all heads together
    Heads heads;
    const Product *qkv, *out, *gate_up, *down;
    float residual_scale;  // of what is added
    int32_t activation;    // of the gate, see rows.h
};

// A decoder: the target, or the target as it drafts.
struct Model {
    const DecoderLayer* layers;
    const Weights* packed_embedding;  // or else
    const void* embedding;            // [vocab][hidden]
    Norm norm;                        // the last one
    const Product* lm_head;
    int32_t num_layers, hidden;
    float embedding_scale;
};

// Recurrent draft heads with the parts of the target they read.
struct Cell {
    Norm state_norm, token_norm, post_norm;
    const Weights* packed_embedding;                  // or else
    const void* embedding;                            // [vocab][hidden]
    const Product *gate_up, *down, *lm_head;
    float embedding_scale;
};
