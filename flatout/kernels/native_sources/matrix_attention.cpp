// Attention by products of bf16: softmax(queries keys^T scale + mask) values, and its gradients for training.
//
// A task is one head of one sample. 32 queries meet all their keys at a time: their scores, 32 x keys, are all that is
// kept of the matrix of weights. The gradients compute them again from the logarithms of the rows' sums.
//
// Many sequences may lie in one row of tokens (inference): then a task is one head of one sequence.

#include <omp.h>

#include <cmath>

#include "bf16_products.h"

namespace flatout {

constexpr int64_t kTogether = 8;  // strips of queries whose share of the keys' gradients is summed up in one product

// bf16 [samples, heads, tokens, features], the features next to each other.
struct Heads {
  uint16_t* data;
  int64_t sample, head, token;  // strides in elements

  uint16_t* at(int64_t s, int64_t h) const { return data + s * sample + h * head; }
};

// Added to the scores, or whether a key may be attended to.
struct Mask {
  const void* data;  // null: none
  int64_t kind;      // 0: fp32, 1: bf16, 2: bool
  int64_t sample, head, query, key;  // strides in elements, 0 where it is the same for all

  float at(int64_t place) const {
    if (kind == 0) return static_cast<const float*>(data)[place];
    if (kind == 1) return from_bf16(static_cast<const uint16_t*>(data)[place]);
    return static_cast<const uint8_t*>(data)[place] ? 0.0f : -INFINITY;
  }
};

struct Attention {
  Heads queries, keys, values, out;
  Heads of_out, of_queries, of_keys, of_values;  // gradients
  Mask mask;
  float* log_sums;  // [samples, heads, queries]; null: not wanted
  int64_t samples, heads, query_count, key_count, features, value_features;
  float scale;
  int64_t causal;
  int64_t threads;
};

inline Side rows_of(const Heads& heads, int64_t s, int64_t h, int64_t tokens, int64_t features) {
  return {reinterpret_cast<const char*>(heads.at(s, h)), kBfloat16, heads.token, 1, tokens, features};
}
inline Side columns_of(const Heads& heads, int64_t s, int64_t h, int64_t tokens, int64_t features) {
  return {reinterpret_cast<const char*>(heads.at(s, h)), kBfloat16, 1, heads.token, features, tokens};
}

// Zeros, then -inf: 32 of them from number 32 - n on leave n scores as they are.
struct Border {
  float values[2 * kSide] = {};
  Border() { std::fill_n(values + kSide, kSide, -INFINITY); }
};
const Border kNothingBehind;

// What one head of one sample needs, and this thread's memory for it.
class Head {
 public:
  explicit Head(const Attention& job) : job_(job) {
    query_strips_ = steps_of(job.query_count);
    key_strips_ = steps_of(job.key_count);
    steps_ = steps_of(job.features);
    value_steps_ = steps_of(job.value_features);
  }

  void forward(int64_t s, int64_t h) {
    static thread_local Scratch of_keys, of_values, of_query, of_scores, of_weights;
    uint16_t* keys = of_keys.halves(key_strips_ * steps_ * kStep);
    uint16_t* values = of_values.halves(key_strips_ * value_steps_ * kStep);
    uint16_t* query = of_query.halves(steps_ * kStep);
    float* scores = of_scores.floats(key_strips_ * kStep);
    uint16_t* weights = of_weights.halves(key_strips_ * kStep);
    pack<true>(rows_of(job_.keys, s, h, job_.key_count, job_.features), 0, key_strips_, 0, steps_, keys, steps_ * kStep);
    pack<true>(columns_of(job_.values, s, h, job_.key_count, job_.value_features), 0, value_steps_, 0, key_strips_, values,
               key_strips_ * kStep);
    const Side queries = rows_of(job_.queries, s, h, job_.query_count, job_.features);
    alignas(64) float sums[kStep];
    for (int64_t strip = 0; strip < query_strips_; ++strip) {
      const int64_t blocks = blocks_of(strip), rows = std::min(kSide, job_.query_count - strip * kSide);
      pack<false>(queries, strip, 1, 0, steps_, query);
      for (int64_t j = 0; j < blocks; ++j) multiply(query, keys + j * steps_ * kStep, steps_, scores + j * kStep, false);
      float inverse[kSide];
      for (int64_t i = 0; i < kSide; ++i) {
        const int64_t row = strip * kSide + i;
        if (i >= rows) {
          for (int64_t j = 0; j < blocks; ++j) std::memset(weights + j * kStep + i * kSide, 0, kSide * 2);
          continue;
        }
        Line largest = Line::all(-INFINITY), total = Line::all(0.0f);
        for (int64_t j = 0; j < blocks; ++j) {
          float* line = scores + j * kStep + i * kSide;
          const Line values = masked(line, s, h, row, j);
          values.store(line);
          largest = max(largest, values);
        }
        const float most = largest.largest();
        const Line shift = Line::all(most == -INFINITY ? 0.0f : most);
        for (int64_t j = 0; j < blocks; ++j) {
          const Line shares = (Line::load(scores + j * kStep + i * kSide) - shift).exponential();
          total = total + shares;
          shares.store(weights + j * kStep + i * kSide);
        }
        const float sum = total.sum();
        inverse[i] = sum == 0.0f ? 0.0f : 1.0f / sum;  // a query that may attend to nothing
        if (job_.log_sums != nullptr)
          job_.log_sums[(s * job_.heads + h) * job_.query_count + row] = sum == 0.0f ? INFINITY : most + std::log(sum);
      }
      for (int64_t step = 0; step < value_steps_; ++step) {
        multiply(weights, values + step * key_strips_ * kStep, blocks, sums, false);
        for (int64_t i = 0; i < rows; ++i)
          put(job_.out, s, h, strip * kSide + i, step, job_.value_features,
              Line::load(sums + i * kSide) * Line::all(inverse[i]));
      }
    }
  }

  void backward(int64_t s, int64_t h) {
    static thread_local Scratch of_keys, of_values, of_across, of_queries, of_outs, of_left, of_blocks, of_slopes, of_turned,
        of_sums;
    const int64_t width = std::max(steps_, value_steps_);
    uint16_t* keys = of_keys.halves(key_strips_ * steps_ * kStep);           // right: columns are keys
    uint16_t* values = of_values.halves(key_strips_ * value_steps_ * kStep);
    uint16_t* across = of_across.halves(key_strips_ * steps_ * kStep);       // right: columns are features
    uint16_t* queries = of_queries.halves(query_strips_ * steps_ * kStep);   // right: columns are features
    uint16_t* outs = of_outs.halves(query_strips_ * value_steps_ * kStep);
    uint16_t* query = of_left.halves(2 * width * kStep);
    uint16_t* out = query + width * kStep;
    float* scores = of_blocks.floats(2 * kStep);
    float* by_weight = scores + kStep;
    uint16_t* slopes = of_slopes.halves((key_strips_ + 1) * kStep);  // gradients by scores: left, inner are keys
    uint16_t* block = slopes + key_strips_ * kStep;
    uint16_t* weights_turned = of_turned.halves(2 * key_strips_ * kTogether * kStep);  // left, inner are queries
    uint16_t* slopes_turned = weights_turned + key_strips_ * kTogether * kStep;
    float* key_sums = of_sums.floats(key_strips_ * (steps_ + value_steps_) * kStep);
    float* value_sums = key_sums + key_strips_ * steps_ * kStep;
    alignas(64) float sums[kStep];

    pack<true>(rows_of(job_.keys, s, h, job_.key_count, job_.features), 0, key_strips_, 0, steps_, keys, steps_ * kStep);
    pack<true>(rows_of(job_.values, s, h, job_.key_count, job_.value_features), 0, key_strips_, 0, value_steps_, values,
               value_steps_ * kStep);
    pack<true>(columns_of(job_.keys, s, h, job_.key_count, job_.features), 0, steps_, 0, key_strips_, across,
               key_strips_ * kStep);
    pack<true>(columns_of(job_.queries, s, h, job_.query_count, job_.features), 0, steps_, 0, query_strips_, queries,
               query_strips_ * kStep);
    pack<true>(columns_of(job_.of_out, s, h, job_.query_count, job_.value_features), 0, value_steps_, 0, query_strips_, outs,
               query_strips_ * kStep);
    std::memset(key_sums, 0, key_strips_ * (steps_ + value_steps_) * kStep * sizeof(float));

    for (int64_t first = 0; first < query_strips_; first += kTogether) {
      const int64_t end = std::min(first + kTogether, query_strips_);
      for (int64_t strip = first; strip < end; ++strip) {
        const int64_t blocks = blocks_of(strip), rows = std::min(kSide, job_.query_count - strip * kSide);
        pack<false>(rows_of(job_.queries, s, h, job_.query_count, job_.features), strip, 1, 0, steps_, query);
        pack<false>(rows_of(job_.of_out, s, h, job_.query_count, job_.value_features), strip, 1, 0, value_steps_, out);
        float means[kSide];
        for (int64_t i = 0; i < rows; ++i) means[i] = agreement(s, h, strip * kSide + i);
        for (int64_t j = 0; j < blocks; ++j) {
          multiply(query, keys + j * steps_ * kStep, steps_, scores, false);
          multiply(out, values + j * value_steps_ * kStep, value_steps_, by_weight, false);
          for (int64_t i = 0; i < kSide; ++i) {
            uint16_t* slope = slopes + j * kStep + i * kSide;
            if (i >= rows) {
              std::memset(slope, 0, kSide * 2);
              std::memset(block + i * kSide, 0, kSide * 2);
              continue;
            }
            const int64_t row = strip * kSide + i;
            const float log_sum = job_.log_sums[(s * job_.heads + h) * job_.query_count + row];
            const Line weight = (masked(scores + i * kSide, s, h, row, j) - Line::all(log_sum)).exponential();
            weight.store(block + i * kSide);
            ((Line::load(by_weight + i * kSide) - Line::all(means[i])) * weight * Line::all(job_.scale)).store(slope);
          }
          const int64_t place = (j * kTogether + strip - first) * kStep;
          pack_step<false>(block, 1, kSide, weights_turned + place);
          pack_step<false>(slopes + j * kStep, 1, kSide, slopes_turned + place);
        }
        for (int64_t step = 0; step < steps_; ++step) {
          multiply(slopes, across + step * key_strips_ * kStep, blocks, sums, false);
          for (int64_t i = 0; i < rows; ++i)
            put(job_.of_queries, s, h, strip * kSide + i, step, job_.features, Line::load(sums + i * kSide));
        }
      }
      for (int64_t j = 0; j < blocks_of(end - 1); ++j) {
        int64_t from = first;  // the first strip of queries that these keys are attended by
        while (blocks_of(from) <= j) ++from;
        const int64_t place = (j * kTogether + from - first) * kStep;
        for (int64_t step = 0; step < steps_; ++step)
          multiply(slopes_turned + place, queries + (step * query_strips_ + from) * kStep, end - from,
                   key_sums + (j * steps_ + step) * kStep, true);
        for (int64_t step = 0; step < value_steps_; ++step)
          multiply(weights_turned + place, outs + (step * query_strips_ + from) * kStep, end - from,
                   value_sums + (j * value_steps_ + step) * kStep, true);
      }
    }
    for (int64_t key = 0; key < job_.key_count; ++key) {
      const int64_t j = key / kSide, i = key % kSide;
      for (int64_t step = 0; step < steps_; ++step)
        put(job_.of_keys, s, h, key, step, job_.features, Line::load(key_sums + (j * steps_ + step) * kStep + i * kSide));
      for (int64_t step = 0; step < value_steps_; ++step)
        put(job_.of_values, s, h, key, step, job_.value_features,
            Line::load(value_sums + (j * value_steps_ + step) * kStep + i * kSide));
    }
  }

 private:
  // Blocks of 32 keys that any of a strip's queries may attend to; at least one.
  int64_t blocks_of(int64_t strip) const {
    return job_.causal ? std::min(key_strips_, strip + 1) : key_strips_;
  }

  // 32 scores of a query: scaled and masked.
  Line masked(const float* scores, int64_t s, int64_t h, int64_t row, int64_t block) const {
    const int64_t first = block * kSide;
    const Line scaled = Line::load(scores) * Line::all(job_.scale);
    const int64_t end = job_.causal ? std::min(job_.key_count, row + 1) : job_.key_count;
    const int64_t real = std::max<int64_t>(0, std::min(kSide, end - first));
    if (job_.mask.data == nullptr) return real == kSide ? scaled : scaled + Line::load(kNothingBehind.values + kSide - real);
    float line[kSide];
    scaled.store(line);
    const Mask& mask = job_.mask;
    const int64_t place = s * mask.sample + h * mask.head + row * mask.query + first * mask.key;
    for (int64_t c = 0; c < real; ++c) line[c] += mask.at(place + c * mask.key);
    for (int64_t c = real; c < kSide; ++c) line[c] = -INFINITY;
    return Line::load(line);
  }

  // Sum of the products of a row's outputs with their gradients: the mean of the gradients by its weights.
  float agreement(int64_t s, int64_t h, int64_t row) const {
    const uint16_t* out = job_.out.at(s, h) + row * job_.out.token;
    const uint16_t* of_out = job_.of_out.at(s, h) + row * job_.of_out.token;
    float sum = 0.0f;
    for (int64_t i = 0; i < job_.value_features; ++i) sum += from_bf16(out[i]) * from_bf16(of_out[i]);
    return sum;
  }

  static void put(const Heads& to, int64_t s, int64_t h, int64_t row, int64_t step, int64_t features, const Line& line) {
    uint16_t* place = to.at(s, h) + row * to.token + step * kSide;
    if (features - step * kSide >= kSide) return line.store(place);
    uint16_t part[kSide];
    line.store(part);
    std::copy_n(part, features - step * kSide, place);
  }

  const Attention& job_;
  int64_t query_strips_, key_strips_, steps_, value_steps_;
};

template <typename Use>
void each_head(const Attention& job, const Use& use) {
  has_matrix_units();
#pragma omp parallel num_threads(job.threads)
  {
    Tiles tiles;
    Head head(job);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < job.samples * job.heads; ++task) use(head, task / job.heads, task % job.heads);
  }
}

// The same for `length` tokens of a row, from token `start` on.
inline Attention sequence_of(const Attention& row, int64_t start, int64_t length) {
  Attention part = row;
  for (Heads* heads : {&part.queries, &part.keys, &part.values, &part.out}) heads->data += start * heads->token;
  part.query_count = part.key_count = length;
  return part;
}

void each_sequence(const Attention& row, const int64_t* starts, const int64_t* lengths, int64_t count) {
  has_matrix_units();
#pragma omp parallel num_threads(row.threads)
  {
    Tiles tiles;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < count * row.heads; ++task) {
      const int64_t sequence = task / row.heads;
      const Attention part = sequence_of(row, starts[sequence], lengths[sequence]);
      Head(part).forward(0, task % row.heads);
    }
  }
}

}  // namespace flatout

extern "C" {

int64_t flatout_has_matrix_units() { return flatout::has_matrix_units() ? 1 : 0; }

void flatout_attention(const flatout::Attention* job) {
  flatout::each_head(*job, [](flatout::Head& head, int64_t s, int64_t h) { head.forward(s, h); });
}

void flatout_attention_gradients(const flatout::Attention* job) {
  flatout::each_head(*job, [](flatout::Head& head, int64_t s, int64_t h) { head.backward(s, h); });
}

void flatout_packed_attention(const flatout::Attention* row, const int64_t* starts, const int64_t* lengths, int64_t count) {
  flatout::each_sequence(*row, starts, lengths, count);
}
}
