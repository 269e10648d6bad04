// Products of a few rows with a large weight matrix, which is read once from memory.
//
// A weight matrix [rows, columns] lies in panels of 16 rows, so that 16 sums stand side by side in one vector register
// and the inputs are broadcast: no sum across a register, and a scale of a group of weights is one product for 16 rows.
//
//   fp32  panel, column, 16 rows
//   bf16  panel, column / 2, 16 rows, 2 columns
//   int8  panel, column / 4, 16 rows, 4 columns: value + 128; one scale a row
//   int4  panel, column / 8, 16 rows, 4 bytes: the low half holds column i, the high one column i + 4, value + 8;
//         scales bf16: panel, column / 32, 16 rows
//
// For int8 and int4 the inputs are rounded to 15 bits of the largest in their group, in two signed bytes: the product
// instructions for bytes then give a sum that is exact but for that rounding.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define FLATOUT_AVX512 1
#endif
#if defined(FLATOUT_AVX512) && defined(__AVX512VNNI__)
#define FLATOUT_VNNI 1
#endif
#if defined(FLATOUT_AVX512) && defined(__AVX512BF16__)
#define FLATOUT_BF16 1
#endif

// Sums are in registers only if every loop over them is written out.
#define FLATOUT_UNROLL _Pragma("GCC unroll 16")

namespace flatout {

constexpr int kPanel = 16;
constexpr int kTile = 8;  // input rows at a time at most: their sums stay in registers

// Each floating-point sum is kept in two parts, every other column in each: in one, each addition would wait for the one
// before. The same two for any number of rows, so that a row comes out the same to the bit in any company.
constexpr int kParts = 2;

enum Format : int64_t { kFloat = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

struct Weight {
  int64_t format;
  int64_t rows;     // real ones; panels are filled up with zeros
  int64_t columns;  // a multiple of group(): filled up with zeros
  const void* data;
  const void* scales;
  const float* bias;  // [rows filled up], or null
};

inline int64_t group_of(int64_t format) { return format == kInt8 ? 64 : format == kInt4 ? 32 : 2; }

inline int64_t bits_of(int64_t format) {
  return format == kFloat ? 32 : format == kBfloat16 ? 16 : format == kInt8 ? 8 : 4;
}

inline float from_bf16(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Inputs of one product in the form that its weights need; every thread has its own.
struct Inputs {
  int64_t rows = 0, columns = 0;
  float* floats = nullptr;      // [rows, columns]: always there, zeros behind the real columns
  uint16_t* halves = nullptr;   // bf16 [rows, columns]
  int8_t* high = nullptr;       // [rows, columns]
  int8_t* low = nullptr;        // [rows, columns]
  float* scales = nullptr;      // [rows, groups]; NaN where an input of the group is not finite
  int32_t* sums = nullptr;      // [rows, groups] of high * 128 + low
};

inline void prepare(Inputs& in, int64_t format) {
  const int64_t count = in.rows * in.columns;
  if (format == kBfloat16) {
    int64_t i = 0;
#ifdef FLATOUT_BF16
    for (; i + 16 <= count; i += 16) {
      const __m256bh narrow = _mm512_cvtneps_pbh(_mm512_loadu_ps(in.floats + i));
      std::memcpy(in.halves + i, &narrow, sizeof narrow);
    }
#endif
    for (; i < count; ++i) in.halves[i] = to_bf16(in.floats[i]);
    return;
  }
  if (format != kInt8 && format != kInt4) return;
  const int64_t group = group_of(format), groups = count / group;
  for (int64_t g = 0; g < groups; ++g) {
    const float* x = in.floats + g * group;
    float largest = 0.0f, probe = 0.0f;
#pragma omp simd reduction(max : largest) reduction(+ : probe)
    for (int64_t i = 0; i < group; ++i) {
      const float size = std::fabs(x[i]);
      largest = size > largest ? size : largest;
      probe += x[i] - x[i];  // 0, or NaN from inf and NaN
    }
    const float factor = largest > 0.0f && probe == 0.0f ? 16256.0f / largest : 0.0f;
    int32_t sum = 0;
    int8_t* high = in.high + g * group;
    int8_t* low = in.low + g * group;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < group; ++i) {
      const int32_t q = factor == 0.0f ? 0 : static_cast<int32_t>(std::nearbyintf(x[i] * factor));
      const int32_t top = (q + 64) >> 7;
      high[i] = static_cast<int8_t>(top);
      low[i] = static_cast<int8_t>(q - top * 128);
      sum += q;
    }
    in.sums[g] = sum;
    in.scales[g] = largest / 16256.0f + probe;
  }
}

// Sums of one panel for `M` input rows from `row`, without bias: sums[m * 16 + lane].

#ifdef FLATOUT_AVX512
template <int M>
inline void put_parts(const __m512 (*parts)[M], float* sums) {
  FLATOUT_UNROLL for (int m = 0; m < M; ++m)
    _mm512_storeu_ps(sums + m * kPanel, _mm512_add_ps(parts[0][m], parts[1][m]));
}
#endif

template <int M>
inline void panel_float(const Inputs& in, int64_t row, const Weight& w, int64_t panel, int64_t ahead, float* sums) {
  const float* data = static_cast<const float*>(w.data) + panel * w.columns * kPanel;
  const float* x = in.floats + row * in.columns;
#ifdef FLATOUT_AVX512
  __m512 parts[kParts][M];
  FLATOUT_UNROLL for (int p = 0; p < kParts; ++p)
    FLATOUT_UNROLL for (int m = 0; m < M; ++m) parts[p][m] = _mm512_setzero_ps();
  for (int64_t k = 0; k < w.columns; k += kParts)
    FLATOUT_UNROLL for (int p = 0; p < kParts; ++p) {
      const float* here = data + (k + p) * kPanel;
      _mm_prefetch(reinterpret_cast<const char*>(here) + ahead, _MM_HINT_T0);
      const __m512 a = _mm512_loadu_ps(here);
      FLATOUT_UNROLL for (int m = 0; m < M; ++m)
        parts[p][m] = _mm512_fmadd_ps(a, _mm512_set1_ps(x[m * in.columns + k + p]), parts[p][m]);
    }
  put_parts<M>(parts, sums);
#else
  for (int m = 0; m < M; ++m) {
    float total[kPanel] = {};
    for (int64_t k = 0; k < w.columns; ++k)
      for (int lane = 0; lane < kPanel; ++lane) total[lane] += data[k * kPanel + lane] * x[m * in.columns + k];
    std::memcpy(sums + m * kPanel, total, sizeof total);
  }
#endif
}

template <int M>
inline void panel_bf16(const Inputs& in, int64_t row, const Weight& w, int64_t panel, int64_t ahead, float* sums) {
  const uint16_t* data = static_cast<const uint16_t*>(w.data) + panel * w.columns * kPanel;
  const uint16_t* x = in.halves + row * in.columns;
#ifdef FLATOUT_BF16
  const auto pair = [&](int m, int64_t k) {
    int32_t bits;
    std::memcpy(&bits, x + m * in.columns + k, 4);
    return (__m512bh)_mm512_set1_epi32(bits);
  };
  __m512 parts[kParts][M];
  FLATOUT_UNROLL for (int p = 0; p < kParts; ++p)
    FLATOUT_UNROLL for (int m = 0; m < M; ++m) parts[p][m] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + 2 * kParts <= w.columns; k += 2 * kParts)
    FLATOUT_UNROLL for (int p = 0; p < kParts; ++p) {
      const uint16_t* here = data + (k + 2 * p) * kPanel;
      _mm_prefetch(reinterpret_cast<const char*>(here) + ahead, _MM_HINT_T0);
      const __m512bh a = (__m512bh)_mm512_loadu_si512(here);
      FLATOUT_UNROLL for (int m = 0; m < M; ++m) parts[p][m] = _mm512_dpbf16_ps(parts[p][m], a, pair(m, k + 2 * p));
    }
  for (; k < w.columns; k += 2) {  // a last pair of columns without a partner
    const __m512bh a = (__m512bh)_mm512_loadu_si512(data + k * kPanel);
    FLATOUT_UNROLL for (int m = 0; m < M; ++m) parts[0][m] = _mm512_dpbf16_ps(parts[0][m], a, pair(m, k));
  }
  put_parts<M>(parts, sums);
#else
  for (int m = 0; m < M; ++m) {
    float total[kPanel] = {};
    for (int64_t k = 0; k < w.columns; k += 2) {
      const float first = from_bf16(x[m * in.columns + k]), second = from_bf16(x[m * in.columns + k + 1]);
      for (int lane = 0; lane < kPanel; ++lane)
        total[lane] += from_bf16(data[k * kPanel + 2 * lane]) * first + from_bf16(data[k * kPanel + 2 * lane + 1]) * second;
    }
    std::memcpy(sums + m * kPanel, total, sizeof total);
  }
#endif
}

#ifdef FLATOUT_VNNI
inline __m512i four(const int8_t* x) {
  int32_t bits;
  std::memcpy(&bits, x, 4);
  return _mm512_set1_epi32(bits);
}

// Whole numbers add up to the same in any order: for few rows in two halves, which do not wait for each other.
template <int M>
constexpr int kHalves = M <= 4 ? 2 : 1;

template <int M>
inline __m512i joined(const __m512i (*sums)[M], int m) {
  return kHalves<M> == 1 ? sums[0][m] : _mm512_add_epi32(sums[0][m], sums[kHalves<M> - 1][m]);
}

// Exact sum of one group for 16 rows as floats, the offset of the weights taken off.
inline __m512 group_sum(__m512i high, __m512i low, int32_t offset) {
  const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(whole, _mm512_set1_epi32(offset)));
}
#endif

template <int M>
inline void panel_int8(const Inputs& in, int64_t row, const Weight& w, int64_t panel, int64_t ahead, float* sums) {
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * w.columns * kPanel;
  const float* scales = static_cast<const float*>(w.scales) + panel * kPanel;
  const int64_t groups = w.columns / 64;
#ifdef FLATOUT_VNNI
  __m512 total[M];
  FLATOUT_UNROLL for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m512i high[kHalves<M>][M], low[kHalves<M>][M];
    FLATOUT_UNROLL for (int h = 0; h < kHalves<M>; ++h)
      FLATOUT_UNROLL for (int m = 0; m < M; ++m) high[h][m] = low[h][m] = _mm512_setzero_si512();
    const uint8_t* here = data + g * 64 * kPanel;
    FLATOUT_UNROLL for (int t = 0; t < 16; ++t) {
      _mm_prefetch(reinterpret_cast<const char*>(here + t * 64) + ahead, _MM_HINT_T0);
      const __m512i a = _mm512_loadu_si512(here + t * 64);
      FLATOUT_UNROLL for (int m = 0; m < M; ++m) {
        const int64_t at = (row + m) * in.columns + g * 64 + 4 * t;
        const int h = t % kHalves<M>;
        high[h][m] = _mm512_dpbusd_epi32(high[h][m], a, four(in.high + at));
        low[h][m] = _mm512_dpbusd_epi32(low[h][m], a, four(in.low + at));
      }
    }
    FLATOUT_UNROLL for (int m = 0; m < M; ++m) {
      const int64_t at = (row + m) * groups + g;
      total[m] = _mm512_fmadd_ps(group_sum(joined<M>(high, m), joined<M>(low, m), 128 * in.sums[at]), _mm512_set1_ps(in.scales[at]), total[m]);
    }
  }
  const __m512 scale = _mm512_loadu_ps(scales);
  FLATOUT_UNROLL for (int m = 0; m < M; ++m) _mm512_storeu_ps(sums + m * kPanel, _mm512_mul_ps(total[m], scale));
#else
  for (int m = 0; m < M; ++m) {
    float total[kPanel] = {};
    for (int64_t g = 0; g < groups; ++g) {
      int32_t exact[kPanel] = {};
      for (int64_t k = g * 64; k < (g + 1) * 64; ++k) {
        const int64_t at = (row + m) * in.columns + k;
        const int32_t q = in.high[at] * 128 + in.low[at];
        for (int lane = 0; lane < kPanel; ++lane)
          exact[lane] += (data[(k & ~int64_t{3}) * kPanel + 4 * lane + (k & 3)] - 128) * q;
      }
      const float factor = in.scales[(row + m) * groups + g];
      for (int lane = 0; lane < kPanel; ++lane) total[lane] += static_cast<float>(exact[lane]) * factor;
    }
    for (int lane = 0; lane < kPanel; ++lane) sums[m * kPanel + lane] = total[lane] * scales[lane];
  }
#endif
}

template <int M>
inline void panel_int4(const Inputs& in, int64_t row, const Weight& w, int64_t panel, int64_t ahead, float* sums) {
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * w.columns * kPanel / 2;
  const int64_t groups = w.columns / 32;
  const uint16_t* scales = static_cast<const uint16_t*>(w.scales) + panel * groups * kPanel;
#ifdef FLATOUT_VNNI
  __m512 total[M];
  FLATOUT_UNROLL for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
  const __m512i half = _mm512_set1_epi8(15);
  for (int64_t g = 0; g < groups; ++g) {
    __m512i high[kHalves<M>][M], low[kHalves<M>][M];
    FLATOUT_UNROLL for (int h = 0; h < kHalves<M>; ++h)
      FLATOUT_UNROLL for (int m = 0; m < M; ++m) high[h][m] = low[h][m] = _mm512_setzero_si512();
    const uint8_t* here = data + g * 16 * kPanel;
    FLATOUT_UNROLL for (int t = 0; t < 4; ++t) {
      _mm_prefetch(reinterpret_cast<const char*>(here + t * 64) + ahead, _MM_HINT_T0);
      const __m512i both = _mm512_loadu_si512(here + t * 64);
      const __m512i a = _mm512_and_si512(both, half), b = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
      FLATOUT_UNROLL for (int m = 0; m < M; ++m) {
        const int64_t at = (row + m) * in.columns + g * 32 + 8 * t;
        constexpr int last = kHalves<M> - 1;
        high[0][m] = _mm512_dpbusd_epi32(high[0][m], a, four(in.high + at));
        low[0][m] = _mm512_dpbusd_epi32(low[0][m], a, four(in.low + at));
        high[last][m] = _mm512_dpbusd_epi32(high[last][m], b, four(in.high + at + 4));
        low[last][m] = _mm512_dpbusd_epi32(low[last][m], b, four(in.low + at + 4));
      }
    }
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + g * kPanel));
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    FLATOUT_UNROLL for (int m = 0; m < M; ++m) {
      const int64_t at = (row + m) * groups + g;
      const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(in.scales[at]));
      total[m] = _mm512_fmadd_ps(group_sum(joined<M>(high, m), joined<M>(low, m), 8 * in.sums[at]), factor, total[m]);
    }
  }
  FLATOUT_UNROLL for (int m = 0; m < M; ++m) _mm512_storeu_ps(sums + m * kPanel, total[m]);
#else
  for (int m = 0; m < M; ++m) {
    float total[kPanel] = {};
    for (int64_t g = 0; g < groups; ++g) {
      int32_t exact[kPanel] = {};
      for (int64_t k = g * 32; k < (g + 1) * 32; ++k) {
        const int64_t at = (row + m) * in.columns + k;
        const int32_t q = in.high[at] * 128 + in.low[at];
        const int shift = (k & 4) ? 4 : 0;
        const uint8_t* here = data + (k / 8) * 64 + (k & 3);
        for (int lane = 0; lane < kPanel; ++lane) exact[lane] += (((here[4 * lane] >> shift) & 15) - 8) * q;
      }
      const float factor = in.scales[(row + m) * groups + g];
      for (int lane = 0; lane < kPanel; ++lane)
        total[lane] += static_cast<float>(exact[lane]) * factor * from_bf16(scales[g * kPanel + lane]);
    }
    std::memcpy(sums + m * kPanel, total, sizeof total);
  }
#endif
}

template <int M>
inline void panel_of(const Inputs& in, int64_t row, const Weight& w, int64_t panel, int64_t ahead, float* sums) {
  switch (w.format) {
    case kFloat: return panel_float<M>(in, row, w, panel, ahead, sums);
    case kBfloat16: return panel_bf16<M>(in, row, w, panel, ahead, sums);
    case kInt8: return panel_int8<M>(in, row, w, panel, ahead, sums);
    default: return panel_int4<M>(in, row, w, panel, ahead, sums);
  }
}

// Sums of one panel for `count` <= kTile input rows from `row`, bias added.
//
// What is to be read next is fetched meanwhile: a little ahead; or, while the last of several tiles goes through a panel
// that is in the cache, the panel after it.
inline void panel_sums(const Inputs& in, int64_t row, int64_t count, const Weight& w, int64_t panel, float* sums) {
  const bool again = row > 0 && row + count == in.rows;
  const int64_t ahead = again ? w.columns * kPanel * bits_of(w.format) / 8 : 2048;
  switch (count) {
    case 1: panel_of<1>(in, row, w, panel, ahead, sums); break;
    case 2: panel_of<2>(in, row, w, panel, ahead, sums); break;
    case 3: panel_of<3>(in, row, w, panel, ahead, sums); break;
    case 4: panel_of<4>(in, row, w, panel, ahead, sums); break;
    case 5: panel_of<5>(in, row, w, panel, ahead, sums); break;
    case 6: panel_of<6>(in, row, w, panel, ahead, sums); break;
    case 7: panel_of<7>(in, row, w, panel, ahead, sums); break;
    default: panel_of<8>(in, row, w, panel, ahead, sums); break;
  }
  if (w.bias == nullptr) return;
  for (int64_t m = 0; m < count; ++m)
    for (int lane = 0; lane < kPanel; ++lane) sums[m * kPanel + lane] += w.bias[panel * kPanel + lane];
}

}  // namespace flatout
