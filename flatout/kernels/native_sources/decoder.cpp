// One pass of a decoder-only Transformer over a few tokens: every layer in one parallel region.
//
// At such sizes the time goes into reading the weights once; a call per operation would cost more than the arithmetic.
// The threads share each stage's tasks by a counter and never wait for each other, only for the tasks of the stage
// before: a thread that the system holds up holds up nobody, but for the one task it is at (stages.h). Norms and the
// rounding of inputs are so small that each thread does them for itself.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "attention.h"
#include "exponential.h"
#include "packing.h"
#include "panels.h"
#include "stages.h"

namespace flatout {

enum Norm : int64_t { kLayerNorm = 0, kRmsNorm = 1 };
enum Activation : int64_t { kGelu = 0, kGeluTanh = 1, kSilu = 2, kRelu = 3 };

struct Layer {
  const float *norm1, *norm1_bias, *norm2, *norm2_bias;  // [width]; a bias may be null
  const float *query_norm, *key_norm;                    // [head width], or null
  Weight qkv, out, up, gate, down;                       // gate.data is null where there is none
  int64_t window;                                        // a token sees this many last ones; 0 = all
  void *keys, *values;                                   // one plane of [length, head width] a slot and kv head: attention.h
};

struct Decoder {
  int64_t width, heads, kv_heads, head_width, inner, layers, vocabulary;
  int64_t norm, activation, rotary_width, cache_is_bf16;
  int64_t cache_length;  // a multiple of 16
  float norm_epsilon, attention_scale;
  const float *cosines, *sines;  // [positions, rotary_width / 2], or null
  const Layer* layer;
  const float *last_norm, *last_norm_bias;
  Weight head;
};

struct Pass {
  int64_t rows, logit_rows, threads;
  float* x;                    // [rows, width]: the embedded tokens; each layer adds to it
  const int64_t *slots, *positions;  // [rows]; rows of one slot stand together, in the order of their positions
  const int64_t* logits_of;    // [logit_rows]: rows whose logits are wanted
  float* logits;               // [logit_rows, vocabulary]
};

inline float tangent(float x) {  // tanh; beyond 10 it is 1 to the last bit
  const float limited = x > 10.0f ? 10.0f : x < -10.0f ? -10.0f : x;
  return 1.0f - 2.0f / (exponential(2.0f * limited) + 1.0f) + (x - x);
}

// The error function to 1.5e-7: Abramowitz and Stegun, 7.1.26.
inline float error_function(float x) {
  const float size = std::fabs(x), t = 1.0f / (1.0f + 0.3275911f * size);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float value = 1.0f - p * t * exponential(-size * size) + (x - x);
  return x < 0.0f ? -value : value;
}

inline void activate(float* x, int64_t count, int64_t kind) {
  switch (kind) {
    case kGelu:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) x[i] = 0.5f * x[i] * (1.0f + error_function(x[i] * 0.70710678f));
      break;
    case kGeluTanh:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i)
        x[i] = 0.5f * x[i] * (1.0f + tangent(0.79788456f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
      break;
    case kSilu:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) x[i] = x[i] / (1.0f + exponential(-x[i]));
      break;
    default:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) x[i] = x[i] > 0.0f ? x[i] : x[i] - x[i];  // relu; NaN stays NaN
  }
}

inline void normalise(const float* x, float* y, int64_t width, int64_t kind, const float* scale, const float* shift,
                      float epsilon) {
  float mean = 0.0f, squares = 0.0f;  // added up in as many parts as a register has places
  if (kind == kLayerNorm) {
#pragma omp simd reduction(+ : mean)
    for (int64_t i = 0; i < width; ++i) mean += x[i];
    mean /= static_cast<float>(width);
  }
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(width) + epsilon);
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) y[i] = (x[i] - mean) * factor * scale[i];
  if (shift == nullptr) return;
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) y[i] += shift[i];
}

inline int64_t filled(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// What one thread works in; allocated once and kept, since a token takes only some milliseconds.
struct Scratch {
  std::vector<float> floats, scores, scales;
  std::vector<Query> queries;
  std::vector<uint16_t> halves;
  std::vector<int8_t> high, low;
  std::vector<int32_t> sums;

  Inputs inputs(int64_t rows, const Weight& w) {
    const size_t count = static_cast<size_t>(rows * w.columns);
    const size_t groups = count / static_cast<size_t>(group_of(w.format)) + 1;
    if (floats.size() < count) floats.resize(count);
    if (w.format == kBfloat16 && halves.size() < count) halves.resize(count);
    if (w.format >= kInt8) {
      if (high.size() < count) high.resize(count), low.resize(count);
      if (scales.size() < groups) scales.resize(groups), sums.resize(groups);
    }
    Inputs in;
    in.rows = rows, in.columns = w.columns, in.floats = floats.data(), in.halves = halves.data();
    in.high = high.data(), in.low = low.data(), in.scales = scales.data(), in.sums = sums.data();
    return in;
  }
};

// Rows [rows, real] at `x` as inputs for `w`, filled up with zeros.
inline Inputs take(Scratch& scratch, const float* x, int64_t rows, int64_t real, const Weight& w) {
  Inputs in = scratch.inputs(rows, w);
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(in.floats + r * in.columns, x + r * real, static_cast<size_t>(real) * 4);
    std::memset(in.floats + r * in.columns + real, 0, static_cast<size_t>(in.columns - real) * 4);
  }
  prepare(in, w.format);
  return in;
}

inline Inputs take_normed(Scratch& scratch, const Decoder& d, const float* x, int64_t rows, const float* scale,
                          const float* shift, const Weight& w) {
  Inputs in = scratch.inputs(rows, w);
  for (int64_t r = 0; r < rows; ++r) {
    float* y = in.floats + r * in.columns;
    normalise(x + r * d.width, y, d.width, d.norm, scale, shift, d.norm_epsilon);
    std::memset(y + d.width, 0, static_cast<size_t>(in.columns - d.width) * 4);
  }
  prepare(in, w.format);
  return in;
}

inline int64_t panels_of(int64_t rows) { return (rows + kPanel - 1) / kPanel; }

inline int64_t chunk_of(int64_t panels, int64_t threads) {
  return std::max<int64_t>(1, std::min<int64_t>(32, panels / (threads * 6)));
}

// Products of all rows with the panels that this thread gets; `put(row, first column, columns, sums)` takes them.
template <typename Put>
inline void product(Stage& stage, const Inputs& in, const Weight& w, int64_t threads, const Put& put) {
  const int64_t panels = panels_of(w.rows);
  stage.share(panels, chunk_of(panels, threads), [&](int64_t panel) {
    float sums[kTile * kPanel];
    const int64_t real = std::min<int64_t>(kPanel, w.rows - panel * kPanel);
    for (int64_t row = 0; row < in.rows; row += kTile) {
      const int64_t count = std::min<int64_t>(kTile, in.rows - row);
      panel_sums(in, row, count, w, panel, sums);
      for (int64_t m = 0; m < count; ++m) put(row + m, panel * kPanel, real, sums + m * kPanel);
    }
  });
}

// The first half of the feed-forward: activation(up), or activation(gate) * up, panel by panel.
inline void expand(Stage& stage, const Inputs& in, const Decoder& d, const Layer& layer, int64_t threads,
                   float* inner) {
  const int64_t panels = panels_of(d.inner);
  stage.share(panels, chunk_of(panels, threads), [&](int64_t panel) {
    float made[kTile * kPanel], gates[kTile * kPanel];
    const int64_t real = std::min<int64_t>(kPanel, d.inner - panel * kPanel);
    for (int64_t row = 0; row < in.rows; row += kTile) {
      const int64_t count = std::min<int64_t>(kTile, in.rows - row);
      panel_sums(in, row, count, layer.up, panel, made);
      if (layer.gate.data == nullptr) {
        activate(made, count * kPanel, d.activation);
      } else {
        panel_sums(in, row, count, layer.gate, panel, gates);
        activate(gates, count * kPanel, d.activation);
        for (int64_t i = 0; i < count * kPanel; ++i) made[i] *= gates[i];
      }
      for (int64_t m = 0; m < count; ++m)
        std::memcpy(inner + (row + m) * d.inner + panel * kPanel, made + m * kPanel, static_cast<size_t>(real) * 4);
    }
  });
}

inline void rotate(const Decoder& d, float* head, int64_t position) {
  const int64_t half = d.rotary_width / 2;
  const float* c = d.cosines + position * half;
  const float* s = d.sines + position * half;
  for (int64_t i = 0; i < half; ++i) {
    const float first = head[i], second = head[i + half];
    head[i] = first * c[i] - second * s[i];
    head[i + half] = second * c[i] + first * s[i];
  }
}

inline void make_ready(const Decoder& d, float* head, int64_t position, const float* norm) {
  if (norm != nullptr) normalise(head, head, d.head_width, kRmsNorm, norm, nullptr, d.norm_epsilon);
  if (d.cosines != nullptr) rotate(d, head, position);
}

// Keys and values of one kv head into the cache for rows [begin, end) of one slot, then their queries' attention.
template <typename Element>
inline void attend_rows(const Decoder& d, const Layer& layer, const Pass& pass, int64_t begin, int64_t end,
                        int64_t kv_head, float* qkv, float* mixed, Scratch& scratch) {
  const int64_t size = d.head_width, row_width = (d.heads + 2 * d.kv_heads) * size, per_kv = d.heads / d.kv_heads;
  const int64_t plane = (pass.slots[begin] * d.kv_heads + kv_head) * d.cache_length * size;
  Kept<Element> kept{static_cast<Element*>(layer.keys) + plane, static_cast<Element*>(layer.values) + plane, size};
  const size_t room = static_cast<size_t>(kQueries * d.cache_length);
  if (scratch.scores.size() < room) scratch.scores.resize(room);
  scratch.queries.clear();
  for (int64_t r = begin; r < end; ++r) {
    float* row = qkv + r * row_width;
    float* key = row + (d.heads + kv_head) * size;
    const int64_t last = pass.positions[r], first = layer.window > 0 ? std::max<int64_t>(0, last - layer.window + 1) : 0;
    make_ready(d, key, last, layer.key_norm);
    kept.put(last, key, key + d.kv_heads * size);
    for (int64_t h = kv_head * per_kv; h < (kv_head + 1) * per_kv; ++h) {
      make_ready(d, row + h * size, last, layer.query_norm);
      scratch.queries.push_back({row + h * size, first, last, mixed + (r * d.heads + h) * size});
    }
  }
  attend(kept, scratch.queries.data(), static_cast<int64_t>(scratch.queries.size()), d.attention_scale,
         scratch.scores.data(), d.cache_length);
}

struct Shared {
  std::vector<float> qkv, mixed, inner;
  std::vector<int64_t> begins;  // first row of each slot's run, and the end
};

constexpr int kStages = 5;

void run_layer(const Decoder& d, const Layer& layer, const Pass& pass, Shared& shared, Scratch& scratch, Stage* stages) {
  const int64_t rows = pass.rows, threads = pass.threads;
  const int64_t qkv_width = (d.heads + 2 * d.kv_heads) * d.head_width;
  const int64_t width_panels = panels_of(d.width), inner_panels = panels_of(d.inner);
  const int64_t runs = static_cast<int64_t>(shared.begins.size()) - 1;
  const auto add = [&](int64_t row, int64_t column, int64_t real, const float* sums) {
    for (int64_t i = 0; i < real; ++i) pass.x[row * d.width + column + i] += sums[i];
  };
  stages[0].run(panels_of(qkv_width), [&] {
    const Inputs in = take_normed(scratch, d, pass.x, rows, layer.norm1, layer.norm1_bias, layer.qkv);
    product(stages[0], in, layer.qkv, threads, [&](int64_t row, int64_t column, int64_t real, const float* sums) {
      std::memcpy(&shared.qkv[row * qkv_width + column], sums, static_cast<size_t>(real) * 4);
    });
  });
  stages[1].run(runs * d.kv_heads, [&] {
    stages[1].share(runs * d.kv_heads, 1, [&](int64_t task) {
      const int64_t run = task / d.kv_heads, begin = shared.begins[run], end = shared.begins[run + 1];
      const auto attend_all = d.cache_is_bf16 ? attend_rows<uint16_t> : attend_rows<float>;
      attend_all(d, layer, pass, begin, end, task % d.kv_heads, shared.qkv.data(), shared.mixed.data(), scratch);
    });
  });
  stages[2].run(width_panels, [&] {
    const Inputs in = take(scratch, shared.mixed.data(), rows, d.heads * d.head_width, layer.out);
    product(stages[2], in, layer.out, threads, add);
  });
  stages[3].run(inner_panels, [&] {
    const Inputs in = take_normed(scratch, d, pass.x, rows, layer.norm2, layer.norm2_bias, layer.up);
    expand(stages[3], in, d, layer, threads, shared.inner.data());
  });
  stages[4].run(width_panels, [&] {
    const Inputs in = take(scratch, shared.inner.data(), rows, d.inner, layer.down);
    product(stages[4], in, layer.down, threads, add);
  });
}

void logits_of_rows(const Decoder& d, const Pass& pass, Scratch& scratch, Stage& stage) {
  if (pass.logit_rows == 0) return;
  stage.run(panels_of(d.vocabulary), [&] {
    std::vector<float> chosen(static_cast<size_t>(pass.logit_rows * d.width));
    for (int64_t r = 0; r < pass.logit_rows; ++r)
      std::memcpy(&chosen[r * d.width], pass.x + pass.logits_of[r] * d.width, static_cast<size_t>(d.width) * 4);
    const Inputs in =
        take_normed(scratch, d, chosen.data(), pass.logit_rows, d.last_norm, d.last_norm_bias, d.head);
    product(stage, in, d.head, pass.threads, [&](int64_t row, int64_t column, int64_t real, const float* sums) {
      std::memcpy(pass.logits + row * d.vocabulary + column, sums, static_cast<size_t>(real) * 4);
    });
  });
}

void run(const Decoder& d, const Pass& pass) {
  Shared shared;
  shared.qkv.resize(static_cast<size_t>(pass.rows * (d.heads + 2 * d.kv_heads) * d.head_width));
  shared.mixed.resize(static_cast<size_t>(pass.rows * d.heads * d.head_width));
  shared.inner.resize(static_cast<size_t>(pass.rows * d.inner));
  for (int64_t r = 0; r < pass.rows; ++r)
    if (r == 0 || pass.slots[r] != pass.slots[r - 1]) shared.begins.push_back(r);
  shared.begins.push_back(pass.rows);
  std::vector<Stage> stages(static_cast<size_t>(kStages * d.layers + 1));
#pragma omp parallel num_threads(static_cast<int>(pass.threads))
  {
    static thread_local Scratch scratch;
    for (int64_t l = 0; l < d.layers; ++l)
      run_layer(d, d.layer[l], pass, shared, scratch, stages.data() + kStages * l);
    logits_of_rows(d, pass, scratch, stages.back());
  }
}

}  // namespace flatout

extern "C" {

void flatout_decoder_pass(const flatout::Decoder* decoder, const flatout::Pass* pass) { flatout::run(*decoder, *pass); }

// One product alone: x [rows, columns real] -> y [rows, w.rows].
void flatout_product(const flatout::Weight* weight, const float* x, int64_t rows, int64_t real, float* y,
                     int64_t threads) {
  using namespace flatout;
  Stage stage;
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    static thread_local Scratch scratch;
    stage.run(panels_of(weight->rows), [&] {
      const Inputs in = take(scratch, x, rows, real, *weight);
      product(stage, in, *weight, threads, [&](int64_t row, int64_t column, int64_t count, const float* sums) {
        std::memcpy(y + row * weight->rows + column, sums, static_cast<size_t>(count) * 4);
      });
    });
  }
}

// A weight matrix into panels: 1, or 0 if it held inf or NaN and has no form of whole numbers.
int64_t flatout_pack(const flatout::Packing* packing, int64_t threads) { return flatout::pack(*packing, threads); }
}
