// Inputs of a linear layer as whole numbers, one scale a token, and its outputs scaled back: each in one pass over
// memory, where torch's operations take seven. Rows are tokens; bf16 is passed as its 16 bits.
//
//     levels[t, i] = 128 + round(x[t, i] / scales[t]),  scales[t] = largest magnitude of the row / 127
//     y[t, o]     <- y[t, o] * scales[t] + bias[o]

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline float load(const float* p, int64_t i) { return p[i]; }
inline float load(const uint16_t* p, int64_t i) {
    uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void store(float* p, int64_t i, float value) { p[i] = value; }
inline void store(uint16_t* p, int64_t i, float value) {  // to the nearest, halves to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    p[i] = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

template <typename T>
void to_levels(const T* x, int64_t rows, int64_t width, uint8_t* levels, float* scales, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < rows; ++t) {
        const T* row = x + t * width;
        float largest = 0.0f, sum = 0.0f;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < width; ++i) largest = std::max(largest, std::fabs(load(row, i)));
        // A maximum may pass over NaN; a sum of zeros times the values does not, and inf becomes NaN in it too.
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; ++i) sum += load(row, i) * 0.0f;
        float scale = std::max(largest / 127.0f, 1e-30f) + sum;
        float inverse = 1.0f / scale;
        scales[t] = scale;
        uint8_t* out = levels + t * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            float level = std::nearbyint(load(row, i) * inverse);
            level = std::min(std::max(level, -127.0f), 127.0f);
            out[i] = static_cast<uint8_t>(static_cast<int32_t>(level) + 128);
        }
    }
}

template <typename T>
void scale_back(T* y, int64_t rows, int64_t width, const float* scales, const float* bias, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < rows; ++t) {
        T* row = y + t * width;
        float scale = scales[t];
        if (bias) {
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) store(row, i, load(row, i) * scale + bias[i]);
        } else {
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) store(row, i, load(row, i) * scale);
        }
    }
}

}  // namespace

extern "C" {

void to_levels_f32(const float* x, int64_t rows, int64_t width, uint8_t* levels, float* scales, int64_t threads) {
    to_levels(x, rows, width, levels, scales, threads);
}
void to_levels_bf16(const uint16_t* x, int64_t rows, int64_t width, uint8_t* levels, float* scales, int64_t threads) {
    to_levels(x, rows, width, levels, scales, threads);
}
void scale_back_f32(float* y, int64_t rows, int64_t width, const float* scales, const float* bias, int64_t threads) {
    scale_back(y, rows, width, scales, bias, threads);
}
void scale_back_bf16(uint16_t* y, int64_t rows, int64_t width, const float* scales, const float* bias, int64_t threads) {
    scale_back(y, rows, width, scales, bias, threads);
}
}
