// Weight matrices into panels (panels.h), quantised on the way: each weight is read once and nothing of the matrix's size
// is held beside the result.
//
// A panel's 16 rows are first written side by side, [columns, 16] in fp32, so that everything after runs down the columns
// with the 16 rows in one register: extremes, scales and rounding need no sum across a register.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "panels.h"

namespace flatout {

enum Element : int64_t { kFloat32 = 0, kBrain16 = 1 };

// Some rows of the matrix, as they lie with the model; strides count elements.
struct Part {
  const void* data;
  int64_t element, rows, row_stride, column_stride;
};

// What is packed: parts under each other, [sum of their rows, columns].
struct Packing {
  const Part* part;
  int64_t parts, rows, columns;
  int64_t format, filled_columns;
  void* data;
  void* scales;  // int8: fp32 [rows filled up]; int4: bf16, as panels.h has them
};

constexpr float kTiny = 1.17549435e-38f;  // a scale below it is 1: whatever it scales is 0
constexpr int kInt4Group = 32;
constexpr int kShrinks = 10;  // as in precision/quantize.py

inline float element_of(const float* data, int64_t at) { return data[at]; }
inline float element_of(const uint16_t* data, int64_t at) { return from_bf16(data[at]); }

// One row of a part into a lane of `panel`, [columns, 16].
template <typename T>
inline void put_row(const T* row, int64_t stride, int64_t columns, float* panel) {
  if (stride == 1)
    for (int64_t k = 0; k < columns; ++k) panel[k * kPanel] = element_of(row, k);
  else
    for (int64_t k = 0; k < columns; ++k) panel[k * kPanel] = element_of(row, k * stride);
}

#ifdef FLATOUT_AVX512
inline __m512 sixteen(const float* data) { return _mm512_loadu_ps(data); }
inline __m512 sixteen(const uint16_t* data) {
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// 16 rows of 16 columns, turned: 32-bit halves of pairs, then pairs, then quarters of the registers change places.
template <typename T>
inline void turn_block(const T* data, int64_t row_stride, float* panel) {
  __m512 r[16], t[16];
  FLATOUT_UNROLL for (int i = 0; i < 16; ++i) r[i] = sixteen(data + i * row_stride);
  FLATOUT_UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  const auto low = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  FLATOUT_UNROLL for (int i = 0; i < 16; i += 4) {
    r[i] = low(t[i], t[i + 2]), r[i + 1] = high(t[i], t[i + 2]);
    r[i + 2] = low(t[i + 1], t[i + 3]), r[i + 3] = high(t[i + 1], t[i + 3]);
  }
  // r[4 * g + c] now holds columns c, 4 + c, 8 + c and 12 + c of rows 4 g to 4 g + 3.
  FLATOUT_UNROLL for (int c = 0; c < 4; ++c) {
    const __m512 first = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x44), second = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x44);
    const __m512 third = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xee), fourth = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xee);
    _mm512_storeu_ps(panel + c * kPanel, _mm512_shuffle_f32x4(first, second, 0x88));
    _mm512_storeu_ps(panel + (4 + c) * kPanel, _mm512_shuffle_f32x4(first, second, 0xdd));
    _mm512_storeu_ps(panel + (8 + c) * kPanel, _mm512_shuffle_f32x4(third, fourth, 0x88));
    _mm512_storeu_ps(panel + (12 + c) * kPanel, _mm512_shuffle_f32x4(third, fourth, 0xdd));
  }
}
#endif

// 16 whole rows of one part at once.
template <typename T>
inline void put_rows(const T* data, int64_t row_stride, int64_t column_stride, int64_t columns, float* panel) {
  if (row_stride == 1) {  // they lie side by side already
    for (int64_t k = 0; k < columns; ++k)
#pragma omp simd
      for (int lane = 0; lane < kPanel; ++lane) panel[k * kPanel + lane] = element_of(data, k * column_stride + lane);
    return;
  }
  int64_t begin = 0;
#ifdef FLATOUT_AVX512
  if (column_stride == 1)
    for (; begin + 16 <= columns; begin += 16) turn_block(data + begin, row_stride, panel + begin * kPanel);
#endif
  constexpr int64_t kBlock = 64;  // columns at a time: what is written stays in the nearest cache
  for (; begin < columns; begin += kBlock)
    for (int lane = 0; lane < kPanel; ++lane)
      put_row(data + lane * row_stride + begin * column_stride, column_stride, std::min(kBlock, columns - begin),
              panel + begin * kPanel + lane);
}

inline void put_from(const Part& part, int64_t row, int64_t count, int64_t columns, float* panel) {
  const auto put = [&](const auto* data) {
    if (count == kPanel) return put_rows(data + row * part.row_stride, part.row_stride, part.column_stride, columns, panel);
    for (int64_t i = 0; i < count; ++i)
      put_row(data + (row + i) * part.row_stride, part.column_stride, columns, panel + i);
  };
  if (part.element == kBrain16) put(static_cast<const uint16_t*>(part.data));
  else put(static_cast<const float*>(part.data));
}

// Rows [first, first + 16) of the whole matrix, zeros where there are none.
inline void gather(const Packing& p, int64_t first, float* panel) {
  const int64_t wanted = std::min<int64_t>(kPanel, p.rows - first);
  if (wanted < kPanel || p.filled_columns > p.columns)
    std::memset(panel, 0, static_cast<size_t>(p.filled_columns) * kPanel * sizeof(float));
  int64_t part_begin = 0;
  for (int64_t i = 0; i < p.parts; ++i) {
    const Part& part = p.part[i];
    const int64_t begin = std::max(first, part_begin), end = std::min(first + wanted, part_begin + part.rows);
    if (begin < end) put_from(part, begin - part_begin, end - begin, p.columns, panel + (begin - first));
    part_begin += part.rows;
  }
}

inline bool all_finite(const float* panel, int64_t count) {
  float probe = 0.0f;  // x - x is 0, or NaN from inf and NaN
#pragma omp simd reduction(+ : probe)
  for (int64_t i = 0; i < count; ++i) probe += panel[i] - panel[i];
  return probe == 0.0f;
}

inline void write_bf16(const float* panel, int64_t columns, uint16_t* out) {
  for (int64_t k = 0; k < columns; k += 2)
    for (int lane = 0; lane < kPanel; ++lane) {
      out[k * kPanel + 2 * lane] = to_bf16(panel[k * kPanel + lane]);
      out[k * kPanel + 2 * lane + 1] = to_bf16(panel[(k + 1) * kPanel + lane]);
    }
}

inline void write_int8(const float* panel, int64_t columns, uint8_t* out, float* scales) {
  float largest[kPanel] = {}, scale[kPanel];
  for (int64_t k = 0; k < columns; ++k)
#pragma omp simd
    for (int lane = 0; lane < kPanel; ++lane) largest[lane] = std::max(largest[lane], std::fabs(panel[k * kPanel + lane]));
  for (int lane = 0; lane < kPanel; ++lane) {
    scale[lane] = largest[lane] / 127.0f >= kTiny ? largest[lane] / 127.0f : 1.0f;
    scales[lane] = scale[lane];
  }
  for (int64_t k = 0; k < columns; k += 4) {
    uint32_t four[kPanel] = {};
    for (int i = 0; i < 4; ++i)
#pragma omp simd
      for (int lane = 0; lane < kPanel; ++lane) {
        float level = std::nearbyintf(panel[(k + i) * kPanel + lane] / scale[lane]);
        level = level > 127.0f ? 127.0f : level < -127.0f ? -127.0f : level;
        four[lane] |= static_cast<uint32_t>(static_cast<int32_t>(level) + 128) << (8 * i);
      }
    std::memcpy(out + k * kPanel, four, sizeof four);
  }
}

// Products and squares of a group's levels under one scale a row: scale = products / squares has the least squared error,
// sum(w^2) - products^2 / squares.
inline void try_levels(const float* group, const float* inverse, float* products, float* squares) {
#pragma omp simd
  for (int lane = 0; lane < kPanel; ++lane) products[lane] = squares[lane] = 0.0f;
  for (int k = 0; k < kInt4Group; ++k)
#pragma omp simd
    for (int lane = 0; lane < kPanel; ++lane) {
      const float value = group[k * kPanel + lane];
      float level = std::nearbyintf(value * inverse[lane]);
      level = level > 7.0f ? 7.0f : level < -8.0f ? -8.0f : level;
      products[lane] += value * level;
      squares[lane] += level * level;
    }
}

inline void inverse_of(const float* scale, float* inverse) {
#pragma omp simd
  for (int lane = 0; lane < kPanel; ++lane) inverse[lane] = 1.0f / scale[lane];
}

// The scale by which a group's levels are rounded, and the one that then fits them best.
inline void best_scales(const float* group, float* rounding, float* fitted) {
  float low[kPanel], high[kPanel], widest[kPanel], gain[kPanel], products[kPanel], squares[kPanel], inverse[kPanel];
  std::memcpy(low, group, sizeof low), std::memcpy(high, group, sizeof high);
  for (int k = 1; k < kInt4Group; ++k)
#pragma omp simd
    for (int lane = 0; lane < kPanel; ++lane) {
      low[lane] = std::min(low[lane], group[k * kPanel + lane]);
      high[lane] = std::max(high[lane], group[k * kPanel + lane]);
    }
  for (int lane = 0; lane < kPanel; ++lane) {
    const float scale = (high[lane] >= -low[lane] ? high[lane] : low[lane]) / -8.0f;  // the larger extreme is exactly -8
    widest[lane] = std::fabs(scale) >= 16 * kTiny ? scale : 1.0f;  // its inverse is finite
    gain[lane] = -1.0f, rounding[lane] = widest[lane], fitted[lane] = 1.0f;
  }
  for (int shrink = 0; shrink < kShrinks; ++shrink) {
    float scale[kPanel];
    const float share = 1.0f - 0.04f * static_cast<float>(shrink);
#pragma omp simd
    for (int lane = 0; lane < kPanel; ++lane) scale[lane] = widest[lane] * share;
    inverse_of(scale, inverse);
    try_levels(group, inverse, products, squares);
#pragma omp simd
    for (int lane = 0; lane < kPanel; ++lane) {
      const float fit = squares[lane] > 0.0f ? products[lane] / squares[lane] : 1.0f;
      const float better = squares[lane] > 0.0f ? fit * products[lane] : 0.0f;
      const bool wins = better > gain[lane];
      gain[lane] = wins ? better : gain[lane];
      rounding[lane] = wins ? scale[lane] : rounding[lane];
      fitted[lane] = wins ? (std::fabs(fit) >= kTiny ? fit : 1.0f) : fitted[lane];
    }
  }
}

inline void write_int4(const float* panel, int64_t columns, uint8_t* out, uint16_t* scales) {
  for (int64_t g = 0; g < columns / kInt4Group; ++g) {
    const float* group = panel + g * kInt4Group * kPanel;
    float rounding[kPanel], fitted[kPanel], inverse[kPanel];
    best_scales(group, rounding, fitted);
    inverse_of(rounding, inverse);
    for (int lane = 0; lane < kPanel; ++lane) scales[g * kPanel + lane] = to_bf16(fitted[lane]);
    for (int k = 0; k < kInt4Group; k += 8) {
      uint32_t four[kPanel] = {};
      for (int i = 0; i < 8; ++i)  // columns 0 to 3 in the low halves of the bytes, 4 to 7 in the high ones
#pragma omp simd
        for (int lane = 0; lane < kPanel; ++lane) {
          float level = std::nearbyintf(group[(k + i) * kPanel + lane] * inverse[lane]);
          level = level > 7.0f ? 7.0f : level < -8.0f ? -8.0f : level;
          four[lane] |= static_cast<uint32_t>(static_cast<int32_t>(level) + 8) << (8 * (i & 3) + (i & 4));
        }
      std::memcpy(out + (g * kInt4Group + k) * kPanel / 2, four, sizeof four);
    }
  }
}

// False: int8 and int4 met a weight that is not finite, which whole numbers cannot stand for.
inline bool pack_panel(const Packing& p, int64_t panel, float* room) {
  const int64_t columns = p.filled_columns, begin = panel * columns * kPanel;
  if (p.format == kFloat) {  // it lies in the panel as it was gathered
    gather(p, panel * kPanel, static_cast<float*>(p.data) + begin);
    return true;
  }
  gather(p, panel * kPanel, room);
  if (p.format == kBfloat16) {
    write_bf16(room, columns, static_cast<uint16_t*>(p.data) + begin);
    return true;
  }
  if (!all_finite(room, columns * kPanel)) return false;
  if (p.format == kInt8) {
    write_int8(room, columns, static_cast<uint8_t*>(p.data) + begin, static_cast<float*>(p.scales) + panel * kPanel);
  } else {
    const int64_t groups = columns / kInt4Group;
    write_int4(room, columns, static_cast<uint8_t*>(p.data) + begin / 2,
               static_cast<uint16_t*>(p.scales) + panel * groups * kPanel);
  }
  return true;
}

inline bool pack(const Packing& p, int64_t threads) {
  const int64_t panels = (p.rows + kPanel - 1) / kPanel;
  bool finite = true;
#pragma omp parallel num_threads(static_cast<int>(threads)) reduction(&& : finite)
  {
    std::vector<float> room(p.format == kFloat ? 0 : static_cast<size_t>(p.filled_columns * kPanel));
#pragma omp for schedule(dynamic, 4)
    for (int64_t panel = 0; panel < panels; ++panel) finite = pack_panel(p, panel, room.data()) && finite;
  }
  return finite;
}

}  // namespace flatout
