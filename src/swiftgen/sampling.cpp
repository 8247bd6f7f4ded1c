// What sampling does with all of the vocabulary: penalty, suppressed tokens, and which tokens are worth a closer look.

#include "kernels.h"

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

}  // extern "C"
