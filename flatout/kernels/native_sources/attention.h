// Attention of a few queries over the keys and values of one head that were kept so far.
//
// Keys lie in panels of 16 positions (position / 16, head width, 16), so that 16 scores stand side by side in one
// register; values lie position by position. Up to kQueries queries go through together: each key and value is loaded
// and widened once for them all. Written with the compiler's vector types, which fit every processor.

#pragma once
#include <algorithm>

#include "exponential.h"
#include "panels.h"

namespace flatout {

constexpr int kQueries = 4;

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Floats load(const uint16_t* from) {
  Halves narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  const Words wide = __builtin_convertvector(narrow, Words) << 16;
  Floats value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline void keep(uint16_t* to, float from) { *to = to_bf16(from); }
inline void keep(float* to, float from) { *to = from; }
inline float widened(uint16_t from) { return from_bf16(from); }
inline float widened(float from) { return from; }

// Where one head's keys and values are kept.
template <typename Element>
struct Kept {
  Element *keys, *values;
  int64_t size;  // head width

  void put(int64_t position, const float* key, const float* value) {
    Element* to = keys + position / kPanel * size * kPanel + position % kPanel;
    for (int64_t i = 0; i < size; ++i) keep(to + i * kPanel, key[i]);
    for (int64_t i = 0; i < size; ++i) keep(values + position * size + i, value[i]);
  }
};

// One query: where it stands, what it may look at, where its result goes.
struct Query {
  float* vector;  // [head width]
  int64_t first, last;
  float* out;  // [head width]
};

// Scores of `P` panels from `panel`: several sums at a time hide how long one addition takes.
template <int Q, int P, typename Element>
inline void score_panels(const Kept<Element>& kept, const Query* queries, int64_t panel, float scale, float* scores,
                         int64_t stride) {
  const int64_t next = kept.size * kPanel;
  const Element* keys = kept.keys + panel * next;
  Floats sums[P][Q] = {};
  for (int64_t i = 0; i < kept.size; ++i)
    for (int p = 0; p < P; ++p) {
      const Floats key = load(keys + p * next + i * kPanel);
      for (int q = 0; q < Q; ++q) sums[p][q] += key * queries[q].vector[i];
    }
  for (int p = 0; p < P; ++p)
    for (int q = 0; q < Q; ++q) store(scores + q * stride + (panel + p) * kPanel, sums[p][q] * scale);
}

template <int Q, typename Element>
inline void score(const Kept<Element>& kept, const Query* queries, int64_t first, int64_t last, float scale,
                  float* scores, int64_t stride) {
  int64_t panel = first / kPanel;
  const int64_t end = last / kPanel + 1;
  for (; panel + 4 <= end; panel += 4) score_panels<Q, 4>(kept, queries, panel, scale, scores, stride);
  for (; panel < end; ++panel) score_panels<Q, 1>(kept, queries, panel, scale, scores, stride);
}

// Scores to shares that add up to 1; outside of what the query may look at they are 0.
inline void soften(const Query& query, int64_t first, int64_t last, float* scores) {
  float largest = -INFINITY, total = 0.0f;
#pragma omp simd reduction(max : largest)
  for (int64_t s = query.first; s <= query.last; ++s) largest = scores[s] > largest ? scores[s] : largest;
#pragma omp simd reduction(+ : total)
  for (int64_t s = query.first; s <= query.last; ++s) {
    scores[s] = exponential(scores[s] - largest) + (scores[s] - scores[s]);  // NaN and inf become NaN
    total += scores[s];
  }
  const float factor = 1.0f / total;
#pragma omp simd
  for (int64_t s = query.first; s <= query.last; ++s) scores[s] *= factor;
  std::fill(scores + first, scores + query.first, 0.0f);
  std::fill(scores + query.last + 1, scores + last + 1, 0.0f);
}

template <int Q, typename Element>
inline void mix(const Kept<Element>& kept, const Query* queries, int64_t first, int64_t last, const float* scores,
                int64_t stride) {
  constexpr int kWide = Q == 1 ? 4 : 2;  // registers of sums a query: as many as there are
  int64_t i = 0;
  for (; i + kWide * kPanel <= kept.size; i += kWide * kPanel) {
    Floats even[Q][kWide] = {}, odd[Q][kWide] = {};
    int64_t s = first;
    for (; s < last; s += 2) {
      const Element *one = kept.values + s * kept.size + i, *two = one + kept.size;
      for (int w = 0; w < kWide; ++w) {
        const Floats a = load(one + w * kPanel), b = load(two + w * kPanel);
        for (int q = 0; q < Q; ++q) {
          even[q][w] += a * scores[q * stride + s];
          odd[q][w] += b * scores[q * stride + s + 1];
        }
      }
    }
    if (s == last)
      for (int w = 0; w < kWide; ++w) {
        const Floats a = load(kept.values + s * kept.size + i + w * kPanel);
        for (int q = 0; q < Q; ++q) even[q][w] += a * scores[q * stride + s];
      }
    for (int q = 0; q < Q; ++q)
      for (int w = 0; w < kWide; ++w) store(queries[q].out + i + w * kPanel, even[q][w] + odd[q][w]);
  }
  for (; i < kept.size; ++i)
    for (int q = 0; q < Q; ++q) {
      float sum = 0.0f;
      for (int64_t s = first; s <= last; ++s) sum += scores[q * stride + s] * widened(kept.values[s * kept.size + i]);
      queries[q].out[i] = sum;
    }
}

template <int Q, typename Element>
inline void attend_together(const Kept<Element>& kept, const Query* queries, float scale, float* scores,
                            int64_t stride) {
  int64_t first = queries[0].first, last = queries[0].last;
  for (int q = 1; q < Q; ++q) {
    first = std::min(first, queries[q].first);
    last = std::max(last, queries[q].last);
  }
  score<Q>(kept, queries, first, last, scale, scores, stride);
  for (int q = 0; q < Q; ++q) soften(queries[q], first, last, scores + q * stride);
  mix<Q>(kept, queries, first, last, scores, stride);
}

// All queries, some at a time. `scores` has room for kQueries * stride; stride is a multiple of 16 beyond the last
// position.
template <typename Element>
inline void attend(const Kept<Element>& kept, const Query* queries, int64_t count, float scale, float* scores,
                   int64_t stride) {
  int64_t q = 0;
  for (; q + kQueries <= count; q += kQueries) attend_together<kQueries>(kept, queries + q, scale, scores, stride);
  for (; q < count; ++q) attend_together<1>(kept, queries + q, scale, scores, stride);
}

}  // namespace flatout
