// Products of bf16 matrices, summed up in fp32, 32 rows by 32 columns at a time.
//
// On a processor with matrix units (AMX) one instruction multiplies a tile of 16 rows x 32 inner elements with one of
// 32 x 16. Four sums (2 x 2 tiles) stay in registers while two tiles of each side pass by. With vector instructions for
// bf16 pairs (AVX-512 bf16) the sums of up to 12 rows do. Elsewhere it is plain C++: for tests, not for speed.
//
// A strip is 32 rows of the left side, or 32 columns of the right one, over the whole inner dimension, in steps of 32:
//
//   left    step, 32 rows, 32 inner elements
//   right   step, 2 halves, 16 inner pairs, 16 columns, 2 elements
//
// What lies outside the matrix is zero in a strip.

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>
#include <numeric>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "exponential.h"
#include "panels.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define FLATOUT_AMX 1
#endif

namespace flatout {

constexpr int64_t kSide = 32;                      // rows or columns of a strip, and inner elements of a step
constexpr int64_t kStep = kSide * kSide;           // elements of a step of a strip
constexpr int64_t kStepBytes = kStep * sizeof(uint16_t);

constexpr int64_t kChunk = 8;  // steps of the passing strip that stay in the first cache

inline int64_t steps_of(int64_t inner) { return (inner + kSide - 1) / kSide; }

// Asks the system for the tile registers; false where there are none.
inline bool has_matrix_units() {
#if defined(FLATOUT_AMX)
  static const bool granted = [] {
    constexpr long kRequest = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return granted;
#else
  return false;
#endif
}

// The intrinsics for tiles do not say what memory they read: without this, a compiler may drop or delay writes to it.
inline void seen_by_compiler(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// While it lives, this thread's tile registers are set up for `multiply`.
class Tiles {
 public:
  Tiles() {
#if defined(FLATOUT_AMX)
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t column_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.column_bytes[tile] = 64;
      config.rows[tile] = 16;
    }
    seen_by_compiler(&config);
    _tile_loadconfig(&config);
#endif
  }
  ~Tiles() {
#if defined(FLATOUT_AMX)
    _tile_release();
#endif
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

#if defined(FLATOUT_BF16) && !defined(FLATOUT_AMX)
// sums[Rows][32] = (sums +) some rows of left x right
template <int Rows>
inline void multiply_rows(const uint16_t* left, const uint16_t* right, int64_t steps, float* sums, bool add) {
  __m512 low[Rows], high[Rows];
  FLATOUT_UNROLL for (int i = 0; i < Rows; ++i) {
    low[i] = add ? _mm512_loadu_ps(sums + i * kSide) : _mm512_setzero_ps();
    high[i] = add ? _mm512_loadu_ps(sums + i * kSide + 16) : _mm512_setzero_ps();
  }
  for (int64_t step = 0; step < steps; ++step, left += kStep, right += kStep) {
    for (int64_t pair = 0; pair < 16; ++pair) {
      const __m512bh first = (__m512bh)_mm512_loadu_si512(right + pair * kSide);
      const __m512bh second = (__m512bh)_mm512_loadu_si512(right + kStep / 2 + pair * kSide);
      FLATOUT_UNROLL for (int i = 0; i < Rows; ++i) {
        int32_t both;
        std::memcpy(&both, left + i * kSide + 2 * pair, sizeof both);
        const __m512bh row = (__m512bh)_mm512_set1_epi32(both);
        low[i] = _mm512_dpbf16_ps(low[i], row, first);
        high[i] = _mm512_dpbf16_ps(high[i], row, second);
      }
    }
  }
  FLATOUT_UNROLL for (int i = 0; i < Rows; ++i) {
    _mm512_storeu_ps(sums + i * kSide, low[i]);
    _mm512_storeu_ps(sums + i * kSide + 16, high[i]);
  }
}
#endif

// sums[32][32] = (sums +) left x right
inline void multiply(const uint16_t* left, const uint16_t* right, int64_t steps, float* sums, bool add) {
#if defined(FLATOUT_AMX)
  constexpr int kRow = kSide * sizeof(float);
  seen_by_compiler(left);
  seen_by_compiler(right);
  seen_by_compiler(sums);
  if (add) {
    _tile_loadd(0, sums, kRow);
    _tile_loadd(1, sums + 16, kRow);
    _tile_loadd(2, sums + 16 * kSide, kRow);
    _tile_loadd(3, sums + 16 * kSide + 16, kRow);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step, left += kStep, right += kStep) {
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    _tile_loadd(7, right + kStep / 2, 64);
    _tile_loadd(5, left + kStep / 2, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kRow);
  _tile_stored(1, sums + 16, kRow);
  _tile_stored(2, sums + 16 * kSide, kRow);
  _tile_stored(3, sums + 16 * kSide + 16, kRow);
  seen_by_compiler(sums);
#elif defined(FLATOUT_BF16)
  // 24 registers of sums, two of the right side and one of the left: one of 32 rows would not fit.
  multiply_rows<12>(left, right, steps, sums, add);
  multiply_rows<12>(left + 12 * kSide, right, steps, sums + 12 * kSide, add);
  multiply_rows<8>(left + 24 * kSide, right, steps, sums + 24 * kSide, add);
#else
  for (int64_t row = 0; row < kSide; ++row) {
    float* out = sums + row * kSide;
    if (!add) std::memset(out, 0, kSide * sizeof(float));
    const uint16_t* a = left + row * kSide;
    const uint16_t* b = right;
    for (int64_t step = 0; step < steps; ++step, a += kStep) {
      for (int64_t half = 0; half < 2; ++half, b += kStep / 2) {
        for (int64_t pair = 0; pair < 16; ++pair) {
          const float first = from_bf16(a[2 * pair]), second = from_bf16(a[2 * pair + 1]);
          const uint16_t* line = b + pair * kSide;
          for (int64_t column = 0; column < 16; ++column)
            out[half * 16 + column] += first * from_bf16(line[2 * column]) + second * from_bf16(line[2 * column + 1]);
        }
      }
    }
  }
#endif
}

// 16 rows of 16 pairs <-> 16 pairs of 16 rows
#if defined(FLATOUT_BF16)
inline void transpose_pairs(__m512i* rows) {
  __m512i t[16], u[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // u[i + 4 j]: column i of each quarter, rows 4 j to 4 j + 3
    t[i] = _mm512_shuffle_i32x4(u[i], u[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(u[i + 8], u[i + 12], 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(u[i], u[i + 4], 0xdd);
    t[i + 12] = _mm512_shuffle_i32x4(u[i + 8], u[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
    rows[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
  }
}

inline __m256i load16(const uint16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline __m256i load16(const float* from) { return (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from)); }
inline __m512i load32(const uint16_t* from) { return _mm512_loadu_si512(from); }
inline __m512i load32(const float* from) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
}
template <typename T>
inline __m512i load_pairs(const T* first, const T* second) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(load16(first)),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(load16(second)), 16));
}
#endif

inline uint16_t half_of(uint16_t value) { return value; }
inline uint16_t half_of(float value) { return to_bf16(value); }

// One step of a strip from memory in which the strip's side (rows of the left, columns of the right) has stride `side`
// and the inner dimension has stride `inner`, in elements; one of them is 1. `Right`: which layout.
template <bool Right, typename T>
inline void pack_step(const T* from, int64_t side, int64_t inner, uint16_t* to) {
#if defined(FLATOUT_BF16)
  for (int64_t half = 0; half < 2; ++half) {
    __m512i lines[16];
    const T* base = from + half * 16 * side;
    if (inner == 1) {  // 16 lines of 32 inner elements
      for (int64_t i = 0; i < 16; ++i) lines[i] = load32(base + i * side);
      if (Right) transpose_pairs(lines);
    } else {  // 16 pairs of inner elements, 16 of the side each
      for (int64_t i = 0; i < 16; ++i) lines[i] = load_pairs(base + 2 * i * inner, base + (2 * i + 1) * inner);
      if (!Right) transpose_pairs(lines);
    }
    for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + (half * 16 + i) * kSide, lines[i]);
  }
#else
  for (int64_t i = 0; i < kSide; ++i)
    for (int64_t k = 0; k < kSide; ++k) {
      const int64_t place = Right ? i / 16 * (kStep / 2) + k / 2 * kSide + i % 16 * 2 + k % 2 : i * kSide + k;
      to[place] = half_of(from[i * side + k * inner]);
    }
#endif
}

// Part of a strip: what is packed is [side, inner] from `from`; beyond `sides` and `inners` there is nothing.
template <bool Right, typename T>
inline void pack_part(const T* from, int64_t side, int64_t inner, int64_t sides, int64_t inners, uint16_t* to) {
  if (sides >= kSide && inners >= kSide) return pack_step<Right>(from, side, inner, to);
  alignas(64) T part[kStep] = {};  // a copy with zeros around it
  const int64_t rows = std::min(kSide, sides), columns = std::min(kSide, inners);
  const bool by_rows = inner == 1;
  const int64_t lines = by_rows ? rows : columns, apart = by_rows ? side : inner, length = by_rows ? columns : rows;
  for (int64_t i = 0; i < lines; ++i) {
    if (length == kSide)
      std::memcpy(part + i * kSide, from + i * apart, kSide * sizeof(T));  // of a size that the compiler knows
    else
      std::memcpy(part + i * kSide, from + i * apart, length * sizeof(T));
  }
  if (by_rows) return pack_step<Right>(part, kSide, 1, to);
  pack_step<Right>(part, 1, kSide, to);
}

// One side of a product.
struct Side {
  const char* data;
  int64_t element;        // kFloat or kBfloat16
  int64_t side, inner;    // strides in elements: from row to row of the left side, column to column of the right one
  int64_t sides, inners;  // how many there are
};

// Steps `first` to `end` of `count` strips from number `strip`, to `to`, where strips are `size` elements apart.
template <bool Right, typename T>
void pack_typed(const Side& from, int64_t strip, int64_t count, int64_t first, int64_t end, uint16_t* to, int64_t size) {
  const auto one = [&](int64_t j, int64_t step) {
    const int64_t row = (strip + j) * kSide, inner = step * kSide;
    const T* place = reinterpret_cast<const T*>(from.data) + row * from.side + inner * from.inner;
    pack_part<Right>(place, from.side, from.inner, from.sides - row, from.inners - inner,
                     to + j * size + (step - first) * kStep);
  };
  if (from.inner == 1) {  // along what is contiguous
    for (int64_t j = 0; j < count; ++j)
      for (int64_t step = first; step < end; ++step) one(j, step);
  } else {
    for (int64_t step = first; step < end; ++step)
      for (int64_t j = 0; j < count; ++j) one(j, step);
  }
}

template <bool Right>
void pack(const Side& from, int64_t strip, int64_t count, int64_t first, int64_t end, uint16_t* to, int64_t size = 0) {
  if (from.element == kFloat)
    pack_typed<Right, float>(from, strip, count, first, end, to, size);
  else
    pack_typed<Right, uint16_t>(from, strip, count, first, end, to, size);
}

// Bytes of packed strips that stay in a thread's second cache: 2 MiB where there is AMX, 1 MiB on Zen 4 and 5.
#if defined(FLATOUT_AMX)
constexpr int64_t kResident = 1200 << 10;
#else
constexpr int64_t kResident = 700 << 10;
#endif

// Strips of one task: as many as stay in the second cache, and each thread has the same share of all.
inline int64_t strips_of_a_task(int64_t strips, int64_t steps, int64_t threads) {
  const int64_t fit = std::max<int64_t>(1, kResident / (steps * kStepBytes));
  const int64_t share = (strips + threads - 1) / threads;
  const int64_t turns = (share + fit - 1) / fit;
  return (share + turns - 1) / turns;
}

// A block's row: 32 numbers, in two registers where there are such.
struct Line {
#if defined(FLATOUT_BF16)
  __m512 low, high;

  static Line all(float value) { return {_mm512_set1_ps(value), _mm512_set1_ps(value)}; }
  static Line load(const float* from) { return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)}; }
  static Line load(const uint16_t* from) { return {widened(from), widened(from + 16)}; }
  void store(float* to) const {
    _mm512_storeu_ps(to, low);
    _mm512_storeu_ps(to + 16, high);
  }
  void store(uint16_t* to) const { _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low)); }
  // What is not read soon need not be in the caches, nor what it overwrites.
  void store_past_caches(float* to) const {
    if (reinterpret_cast<uintptr_t>(to) % 64 != 0) return store(to);
    _mm512_stream_ps(to, low);
    _mm512_stream_ps(to + 16, high);
  }
  float largest() const { return _mm512_reduce_max_ps(_mm512_max_ps(low, high)); }
  float sum() const { return _mm512_reduce_add_ps(_mm512_add_ps(low, high)); }
  Line exponential() const { return {exponential(low), exponential(high)}; }
  friend Line operator+(Line a, Line b) { return {_mm512_add_ps(a.low, b.low), _mm512_add_ps(a.high, b.high)}; }
  friend Line operator-(Line a, Line b) { return {_mm512_sub_ps(a.low, b.low), _mm512_sub_ps(a.high, b.high)}; }
  friend Line operator*(Line a, Line b) { return {_mm512_mul_ps(a.low, b.low), _mm512_mul_ps(a.high, b.high)}; }
  friend Line operator/(Line a, Line b) { return {_mm512_div_ps(a.low, b.low), _mm512_div_ps(a.high, b.high)}; }
  friend Line max(Line a, Line b) { return {_mm512_max_ps(a.low, b.low), _mm512_max_ps(a.high, b.high)}; }
  // `values` where `sign` is not zero or less, which NaN is not; 0 elsewhere
  friend Line where_positive(Line sign, Line values) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(sign.low, _mm512_setzero_ps(), _CMP_NLE_UQ), values.low),
            _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(sign.high, _mm512_setzero_ps(), _CMP_NLE_UQ), values.high)};
  }

 private:
  static __m512 widened(const uint16_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load16(from)), 16));
  }
  // As in exponential.h, and 0 for what is far below: the processor takes a hundred cycles for a number too small to be
  // a normal one. NaN stays NaN.
  static __m512 exponential(__m512 x) {
    const __mmask16 near = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), _mm512_min_ps(_mm512_set1_ps(88.0f), x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f),
                                      _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x));
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (const float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
      p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(term));
    p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(near, p, n);
  }
#else
  float values[kSide];

  static Line all(float value) {
    Line line;
    std::fill_n(line.values, kSide, value);
    return line;
  }
  static Line load(const float* from) {
    Line line;
    std::copy_n(from, kSide, line.values);
    return line;
  }
  static Line load(const uint16_t* from) {
    Line line;
    std::transform(from, from + kSide, line.values, from_bf16);
    return line;
  }
  void store(float* to) const { std::copy_n(values, kSide, to); }
  void store_past_caches(float* to) const { store(to); }
  void store(uint16_t* to) const { std::transform(values, values + kSide, to, to_bf16); }
  float largest() const { return *std::max_element(values, values + kSide); }
  float sum() const { return std::accumulate(values, values + kSide, 0.0f); }
  Line exponential() const {
    return each(*this, *this, [](float x, float) { return x < -87.0f ? 0.0f : flatout::exponential(x); });
  }
  friend Line operator+(const Line& a, const Line& b) { return each(a, b, [](float x, float y) { return x + y; }); }
  friend Line operator-(const Line& a, const Line& b) { return each(a, b, [](float x, float y) { return x - y; }); }
  friend Line operator*(const Line& a, const Line& b) { return each(a, b, [](float x, float y) { return x * y; }); }
  friend Line operator/(const Line& a, const Line& b) { return each(a, b, [](float x, float y) { return x / y; }); }
  friend Line max(const Line& a, const Line& b) { return each(a, b, [](float x, float y) { return x >= y ? x : y; }); }  // y if one is NaN
  friend Line where_positive(const Line& sign, const Line& values) {
    return each(sign, values, [](float x, float y) { return x <= 0.0f ? 0.0f : y; });
  }

 private:
  template <typename Use>
  static Line each(const Line& a, const Line& b, const Use& use) {
    Line line;
    for (int64_t i = 0; i < kSide; ++i) line.values[i] = use(a.values[i], b.values[i]);
    return line;
  }
#endif
};

// Memory that a thread keeps from one product to the next: mapping it anew each time costs more than the product.
class Scratch {
 public:
  uint16_t* halves(int64_t count) { return static_cast<uint16_t*>(bytes(count * 2)); }
  float* floats(int64_t count) { return static_cast<float*>(bytes(count * 4)); }
  ~Scratch() { std::free(data_); }

 private:
  void* bytes(int64_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = (count + kPage - 1) / kPage * kPage;
      data_ = std::aligned_alloc(kPage, size_);
      if (data_ == nullptr) throw std::bad_alloc();  // which ends the program, as no memory at all would
#if defined(__linux__)
      madvise(data_, size_, MADV_HUGEPAGE);  // one entry of the address cache for all that a task packs
#endif
    }
    return data_;
  }
  static constexpr int64_t kPage = 2 << 20;
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace flatout
