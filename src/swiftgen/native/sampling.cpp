// What sampling does with all of the vocabulary: penalty, suppressed tokens, and which tokens are worth a closer look;
// then temperature, min-p and noise for those. The same as the operators of decoding/sampling.py, in two calls.

#include "kernels.h"

namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, MIX1 = 0xBF58476D1CE4E5B9, MIX2 = 0x94D049BB133111EB;

// The finaliser of splitmix64.
inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * MIX1;
    x = (x ^ (x >> 27)) * MIX2;
    return x ^ (x >> 31);
}

}  // namespace

extern "C" {

// Penalises, in place, each column of a row's window once, adds `bias`, and finds the columns that are in some row at
// most `reach` below its largest logit: their numbers, ascending, go to `columns`, and how many to the caller.
//
// logits is [rows][size], windows [rows][window], bias [size] 0 or -inf; `marks` has room for `size` bytes.
int64_t swiftgen_narrow(float* logits, int rows, int64_t size, const int64_t* windows, int64_t window, float theta,
                        const float* bias, float reach, float slack, uint8_t* marks, int64_t* columns) {
    std::vector<float> limits(rows);
#pragma omp parallel if (rows > 1)
    {
        std::vector<uint64_t> seen((size + 63) / 64);
#pragma omp for schedule(static)
        for (int row = 0; row < rows; ++row) {
            float* own = logits + row * size;
            std::fill(seen.begin(), seen.end(), 0);
            for (int64_t i = 0; i < window; ++i) {
                const int64_t column = windows[row * window + i];
                const uint64_t bit = uint64_t(1) << (column % 64);
                if (seen[column / 64] & bit) continue;
                seen[column / 64] |= bit;
                own[column] = own[column] > 0 ? own[column] / theta : own[column] * theta;
            }
            vec largest = splat(NEG_INF);
            int64_t i = 0;
            for (; i + LANES <= size; i += LANES) {
                const vec v = load(own + i) + load(bias + i);
                store(own + i, v);
                largest = max(largest, v);
            }
            float most = NEG_INF;
            for (; i < size; ++i) most = std::max(most, own[i] += bias[i]);
            for (int lane = 0; lane < LANES; ++lane) most = std::max(most, largest[lane]);
            limits[row] = most - reach - slack * (1 + std::fabs(most));
        }
#pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < (size + 4095) / 4096; ++chunk) {
            const int64_t begin = chunk * 4096, end = std::min(size, begin + 4096);
            std::memset(marks + begin, 0, end - begin);
            for (int row = 0; row < rows; ++row)
                for (int64_t i = begin; i < end; ++i) marks[i] |= !(logits[row * size + i] < limits[row]);
        }
    }
    int64_t count = 0;
    for (int64_t i = 0; i < size; ++i) {
        columns[count] = i;
        count += marks[i];
    }
    return count;
}

// Scores of `count` columns, [rows][count]: logits over temperature plus the noise of `tokens`, which the columns stand
// for; -inf for what is more than `log_min_p` below the largest of its row.
void swiftgen_score(const float* logits, int rows, int64_t size, const int64_t* columns, int64_t count,
                    const int64_t* tokens, const int64_t* positions, int64_t seed, float temperature, float log_min_p,
                    double* scores) {
    for (int row = 0; row < rows; ++row) {
        const float* own = logits + row * size;
        double* out = scores + row * count;
        float largest = NEG_INF;
        for (int64_t i = 0; i < count; ++i) largest = std::max(largest, own[columns[i]] / temperature);
        const float limit = std::min(largest, largest + log_min_p);
        const uint64_t key = mix(mix(uint64_t(seed) * GOLDEN + 1) + uint64_t(positions[row]) * GOLDEN);
        for (int64_t i = 0; i < count; ++i) {
            const float value = own[columns[i]] / temperature;
            if (value < limit || value == NEG_INF) {
                out[i] = NEG_INF;
                continue;
            }
            const uint64_t bits = mix(key + uint64_t(tokens[i]) * GOLDEN) >> 12;
            const double uniform = ((double)bits + 0.5) * 0x1p-52;
            out[i] = (double)value - std::log(-std::log(uniform));
        }
    }
}

}  // extern "C"
