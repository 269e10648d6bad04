// Cross-entropy of a linear layer's scores, with all gradients, where the scores are never in memory as a whole.
//
// Two passes over the weights, some strips of classes at a time. The first sums up each row's exponentials. The second
// has the gradient by each score, which goes straight into two products: the gradient of the inputs, summed up for each
// thread, and that of these classes' weights, which is then complete.
//
// On matrix units the second pass computes the scores again. Elsewhere a product takes three times as long, and the
// exponentials are kept meanwhile in bf16, to which the gradient is rounded anyway: of as many rows at a time as fit into
// kKept bytes. Each time the weights are packed and their gradients are read and written again, which takes as long as
// the scores of 200 rows; so where there are many times, of few rows each, nothing is kept either.

#include <omp.h>

#include <cmath>
#include <vector>

#include "bf16_products.h"

namespace flatout {

constexpr int64_t kIgnored = INT64_MIN;

struct Loss {
  Side hidden;  // [rows, width]: left
  Side weight;  // [width, classes]: right
  const float* bias;       // [classes], or null
  const int64_t* targets;  // [rows]; kIgnored counts for nothing
  float smoothing;
  float scale;       // of the gradients
  float* losses;     // [rows]
  float* of_hidden;  // [rows, width], or null
  float* of_weight;  // [classes, width], or null
  float* of_bias;    // [classes], or null
  int64_t threads;
};

// What one thread, and then all of them, know of a row's scores.
struct RowSums {
  float largest = -INFINITY;
  float exponentials = 0.0f;  // of scores less `largest`
  float scores = 0.0f;        // sum
  float target = 0.0f;        // score of the target
};

#if defined(FLATOUT_AMX)
constexpr int64_t kKept = 0;
#else
constexpr int64_t kKept = 64 << 20;  // bytes of exponentials
#endif
constexpr int64_t kWorthKeeping = 16;  // strips of rows at a time

constexpr int64_t kFew = 8;   // strips of classes in the second pass, which keeps more about each
constexpr int64_t kWide = 8;  // strips of the width whose sums are written together

class LossRun {
 public:
  // further: are gradients of the same weights there already, to which those of these rows are added?
  LossRun(const Loss& job, bool keeps, bool further) : job_(job), keeps_(keeps), further_(further) {
    rows_ = job.hidden.sides;
    width_ = job.hidden.inners;
    classes_ = job.weight.sides;
    steps_ = steps_of(width_);
    turns_ = steps_of(rows_);
    strips_ = steps_of(classes_);
    static thread_local Scratch of_left, of_right;
    left_ = of_left.halves(turns_ * steps_ * kStep);
    right_ = of_right.halves(turns_ * steps_ * kStep);
    group_ = strips_of_a_task(strips_, steps_, job.threads * 2);
    gradients_ = job.of_hidden != nullptr || job.of_weight != nullptr || job.of_bias != nullptr;
  }

  void run() {
    std::vector<RowSums> sums(rows_ * job_.threads);
    std::vector<float> log_sums(turns_ * kSide, 0.0f);
    static thread_local Scratch of_inputs;
    const int64_t size = turns_ * steps_ * kStep;  // in blocks of 32 x 32: turn, step
    float* const inputs = job_.of_hidden != nullptr ? of_inputs.floats(size * job_.threads) : nullptr;
    Scratch of_kept;
    std::vector<float> shifts(keeps_ && gradients_ ? strips_ * turns_ * kSide : 0);
    if (!shifts.empty()) {
      kept_ = of_kept.halves(strips_ * turns_ * kStep);
      shifts_ = shifts.data();
    }
#pragma omp parallel num_threads(job_.threads)
    {
      Tiles tiles;
      const int64_t me = omp_get_thread_num();
#pragma omp single
      team_ = omp_get_num_threads();  // OpenMP may give fewer than asked for, and the sums of others are old
      pack_hidden();
      add_up_all(sums.data() + me * rows_);
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows_; ++row) log_sums[row] = merge(sums, row);
      if (gradients_) differentiate_all(log_sums.data(), inputs == nullptr ? nullptr : inputs + me * size);
      if (inputs != nullptr) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows_; ++row) gather(inputs, size, row);
      }
    }
  }

 private:
  // What follows, up to `score`, is called by all threads, which share the work.

  void pack_hidden() const {
    const Side& hidden = job_.hidden;
    const Side by_row = {hidden.data, hidden.element, hidden.inner, hidden.side, width_, rows_};
#pragma omp for schedule(static)
    for (int64_t turn = 0; turn < turns_; ++turn) {
      pack<false>(hidden, turn, 1, 0, steps_, left_ + turn * steps_ * kStep);
      if (job_.of_weight != nullptr) pack<true>(by_row, 0, steps_, turn, turn + 1, right_ + turn * kStep, turns_ * kStep);
    }
  }

  // The first pass. sums: [rows], of this thread
  void add_up_all(RowSums* sums) const {
    static thread_local Scratch of_scores, of_strips;
    float* const scores = of_scores.floats(group_ * kStep);
    uint16_t* const packed = of_strips.halves(group_ * steps_ * kStep);
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < strips_; first += group_) {
      const int64_t count = std::min(group_, strips_ - first);
      pack<true>(job_.weight, first, count, 0, steps_, packed, steps_ * kStep);
      for (int64_t turn = 0; turn < turns_; ++turn) {
        score(turn, packed, count, scores);
        for (int64_t i = 0; i < rows_of(turn); ++i)
          add_up(scores + i * kSide, first, count, turn * kSide + i, sums[turn * kSide + i]);
      }
    }
  }

  // The second pass. inputs: sums of the gradient of `hidden`, of this thread; null where it is not wanted
  void differentiate_all(const float* log_sums, float* inputs) const {
    const int64_t group = std::min(group_, kFew);
    static thread_local Scratch of_scores, of_strips, of_gradients, of_columns, of_weights, of_rows;
    float* const scores = of_scores.floats(group * kStep);
    float* const rows = of_rows.floats(group * kWide * kStep);
    uint16_t* const packed = of_strips.halves(group * steps_ * kStep);
    uint16_t* const by_score = of_gradients.halves(group * kStep);
    uint16_t* const by_class = of_columns.halves(group * turns_ * kStep);
    uint16_t* const across = of_weights.halves(group * steps_ * kStep);
    if (inputs != nullptr) std::memset(inputs, 0, turns_ * steps_ * kStep * sizeof(float));
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < strips_; first += group) {
      const int64_t count = std::min(group, strips_ - first);
      float of_bias[kFew * kSide] = {};
      if (kept_ == nullptr) pack<true>(job_.weight, first, count, 0, steps_, packed, steps_ * kStep);
      if (inputs != nullptr) pack_across(first, count, across);
      for (int64_t turn = 0; turn < turns_; ++turn) {
        if (kept_ == nullptr) score(turn, packed, count, scores);
        for (int64_t j = 0; j < count; ++j) {
          for (int64_t i = 0; i < kSide; ++i)
            differentiate(scores + j * kStep + i * kSide, first + j, turn * kSide + i, log_sums,
                          by_score + j * kStep + i * kSide, of_bias + j * kSide);
          if (job_.of_weight != nullptr)
            pack_step<false>(by_score + j * kStep, 1, kSide, by_class + (j * turns_ + turn) * kStep);
        }
        if (inputs != nullptr) add_to_inputs(by_score, across, count, inputs + turn * steps_ * kStep);
      }
      if (job_.of_weight != nullptr) weigh(by_class, first, count, rows);
      for (int64_t c = 0; job_.of_bias != nullptr && c < std::min(count * kSide, classes_ - first * kSide); ++c)
        job_.of_bias[first * kSide + c] = of_bias[c] + (further_ ? job_.of_bias[first * kSide + c] : 0.0f);
    }
  }

  // The share of some classes in the gradient of 32 rows of inputs.
  void add_to_inputs(const uint16_t* by_score, const uint16_t* across, int64_t count, float* sums) const {
    for (int64_t step = 0; step < steps_; ++step, sums += kStep) {
      for (int64_t line = 0; line < kStep; line += 16) __builtin_prefetch(sums + kStep + line, 1, 3);
      multiply(by_score, across + step * count * kStep, count, sums, true);
    }
  }

  int64_t rows_of(int64_t turn) const { return std::min(kSide, rows_ - turn * kSide); }
  bool counts(int64_t row) const { return row < rows_ && job_.targets[row] != kIgnored; }

  // Scores of 32 rows for `count` strips of classes, bias included: a block of 32 x 32 each.
  void score(int64_t turn, const uint16_t* packed, int64_t count, float* scores) const {
    for (int64_t step = 0; step < steps_; step += kChunk) {
      const uint16_t* rows = left_ + (turn * steps_ + step) * kStep;
      for (int64_t j = 0; j < count; ++j)
        multiply(rows, packed + (j * steps_ + step) * kStep, std::min(kChunk, steps_ - step), scores + j * kStep, step > 0);
    }
  }

  // A row's scores for one strip of classes, with the bias; minus infinity where there are no classes.
  Line with_bias(const float* scores, int64_t first) const {
    const int64_t real = std::min(kSide, classes_ - first);
    if (real == kSide) {
      const Line line = Line::load(scores);
      return job_.bias == nullptr ? line : line + Line::load(job_.bias + first);
    }
    float line[kSide];
    for (int64_t c = 0; c < kSide; ++c)
      line[c] = c >= real ? -INFINITY : scores[c] + (job_.bias == nullptr ? 0.0f : job_.bias[first + c]);
    return Line::load(line);
  }

  void add_up(float* scores, int64_t strip, int64_t count, int64_t row, RowSums& sums) const {
    if (!counts(row)) return;
    const int64_t target = job_.targets[row] - strip * kSide;
    Line best = Line::all(-INFINITY), total = Line::all(0.0f);
    for (int64_t j = 0; j < count; ++j) {
      float* line = scores + j * kStep;
      const Line values = with_bias(line, (strip + j) * kSide);
      values.store(line);
      best = max(best, values);
      if (target >= j * kSide && target < (j + 1) * kSide) sums.target = line[target - j * kSide];
      if (job_.smoothing != 0.0f)
        for (int64_t c = 0; c < std::min(kSide, classes_ - (strip + j) * kSide); ++c) sums.scores += line[c];
    }
    const float largest = best.largest();
    const Line shift = Line::all(largest == -INFINITY ? 0.0f : largest);  // -inf less -inf is no number
    for (int64_t j = 0; j < count; ++j) {
      const Line exponentials = (Line::load(scores + j * kStep) - shift).exponential();
      total = total + exponentials;
      if (kept_ == nullptr) continue;
      exponentials.store(kept(strip + j, row));
      shifts_[(strip + j) * turns_ * kSide + row] = largest;
    }
    if (largest == -INFINITY) return;  // none of these classes has a share
    const float highest = std::max(sums.largest, largest), sum = total.sum();
    if (sums.exponentials != 0.0f) sums.exponentials *= exponential(sums.largest - highest);
    sums.exponentials += largest == highest ? sum : sum * exponential(largest - highest);
    sums.largest = highest;
  }

  uint16_t* kept(int64_t strip, int64_t row) const {
    return kept_ + (strip * turns_ + row / kSide) * kStep + row % kSide * kSide;
  }

  // The row's loss; returns the logarithm of its sum of exponentials.
  float merge(const std::vector<RowSums>& sums, int64_t row) const {
    RowSums all;
    for (int64_t t = 0; t < job_.threads; ++t) all.largest = std::max(all.largest, sums[t * rows_ + row].largest);
    for (int64_t t = 0; t < job_.threads; ++t) {
      const RowSums& one = sums[t * rows_ + row];
      all.scores += one.scores;
      all.target += one.target;
      if (one.exponentials != 0.0f) all.exponentials += one.exponentials * std::exp(one.largest - all.largest);
    }
    const float log_sum = all.largest + std::log(all.exponentials);
    const float mean = job_.smoothing == 0.0f ? 0.0f : job_.smoothing * all.scores / static_cast<float>(classes_);
    job_.losses[row] = counts(row) ? log_sum - (1.0f - job_.smoothing) * all.target - mean : 0.0f;
    return log_sum;
  }

  // A row's share of each class of a strip.
  Line shares_of(const float* scores, int64_t strip, int64_t row, float log_sum) const {
    if (kept_ == nullptr) return (with_bias(scores, strip * kSide) - Line::all(log_sum)).exponential();
    return Line::load(kept(strip, row)) * Line::all(std::exp(shifts_[strip * turns_ * kSide + row] - log_sum));
  }

  // A row's scores for one strip of classes -> the gradient by them, in bf16.
  void differentiate(const float* scores, int64_t strip, int64_t row, const float* log_sums, uint16_t* to,
                     float* of_bias) const {
    if (!counts(row)) {
      std::memset(to, 0, kSide * sizeof(uint16_t));
      return;
    }
    const int64_t first = strip * kSide;
    const Line shares = shares_of(scores, strip, row, log_sums[row]);
    Line values = (shares - Line::all(job_.smoothing / static_cast<float>(classes_))) * Line::all(job_.scale);
    const int64_t target = job_.targets[row] - first, real = std::min(kSide, classes_ - first);
    if ((target >= 0 && target < kSide) || real < kSide) {
      float line[kSide];
      values.store(line);
      if (target >= 0 && target < kSide) line[target] -= (1.0f - job_.smoothing) * job_.scale;
      std::fill(line + real, line + kSide, 0.0f);
      values = Line::load(line);
    }
    (Line::load(of_bias) + values).store(of_bias);
    values.store(to);
  }

  // The weights of some strips of classes, [classes, width], as the right side of the product with their gradients.
  void pack_across(int64_t first, int64_t count, uint16_t* to) const {
    const int64_t bytes = job_.weight.element == kFloat ? 4 : 2, place = first * kSide * job_.weight.side * bytes;
    const Side across = {job_.weight.data + place,   job_.weight.element, job_.weight.inner, job_.weight.side, width_,
                         classes_ - first * kSide};
    pack<true>(across, 0, steps_, 0, count, to, count * kStep);
  }

  // The gradients of some strips of classes' weights, from those of their scores in all rows. A kilobyte of each row is
  // written at a time: every row is in another page.
  void weigh(const uint16_t* by_class, int64_t strip, int64_t count, float* sums) const {
    const int64_t real = std::min(count * kSide, classes_ - strip * kSide);
    for (int64_t first = 0; first < steps_; first += kWide) {
      const int64_t end = std::min(first + kWide, steps_);
      for (int64_t step = first; step < end; ++step)
        for (int64_t turn = 0; turn < turns_; turn += kChunk)
          for (int64_t j = 0; j < count; ++j)
            multiply(by_class + (j * turns_ + turn) * kStep, right_ + (step * turns_ + turn) * kStep,
                     std::min(kChunk, turns_ - turn), sums + (j * kWide + step - first) * kStep, turn > 0);
      for (int64_t i = 0; i < real; ++i)
        for (int64_t step = first; step < end; ++step) {
          const float* line = sums + (i / kSide * kWide + step - first) * kStep + i % kSide * kSide;
          float* to = job_.of_weight + (strip * kSide + i) * width_ + step * kSide;
          const int64_t columns = std::min(kSide, width_ - step * kSide);
          if (columns == kSide) {
            further_ ? (Line::load(line) + Line::load(to)).store(to) : Line::load(line).store_past_caches(to);
            continue;
          }
          for (int64_t c = 0; c < columns; ++c) to[c] = line[c] + (further_ ? to[c] : 0.0f);
        }
    }
  }

  // A row of the inputs' gradient, from the threads' sums.
  void gather(const float* inputs, int64_t size, int64_t row) const {
    const int64_t turn = row / kSide, i = row % kSide;
    for (int64_t step = 0; step < steps_; ++step) {
      const float* block = inputs + (turn * steps_ + step) * kStep + i * kSide;
      const int64_t columns = std::min(kSide, width_ - step * kSide);
      for (int64_t c = 0; c < columns; ++c) {
        float sum = 0.0f;
        for (int64_t t = 0; t < team_; ++t) sum += block[t * size + c];
        job_.of_hidden[row * width_ + step * kSide + c] = sum;
      }
    }
  }

  const Loss& job_;
  const bool keeps_, further_;
  bool gradients_;
  uint16_t* kept_ = nullptr;  // exponentials of scores less their shift: strip of classes, strip of rows; null: not kept
  float* shifts_ = nullptr;   // strip of classes, row
  int64_t rows_, width_, classes_, steps_, turns_, strips_, group_;
  int64_t team_ = 1;  // threads that take part
  uint16_t* left_;   // rows: strip, then step of the width
  uint16_t* right_;  // the same numbers, [rows, width], as a right side: step of the width, then strip of rows
};

// Rows that are taken at a time, with their exponentials kept; 0: none are kept.
int64_t rows_kept(const Loss& job) {
  const int64_t turn_bytes = steps_of(job.weight.sides) * kStep * sizeof(uint16_t), turns = steps_of(job.hidden.sides);
  const int64_t fit = kKept / turn_bytes;
  if (turns == 0 || fit < std::min(turns, kWorthKeeping)) return 0;
  const int64_t parts = (turns + fit - 1) / fit;
  return (turns + parts - 1) / parts * kSide;
}

void run(const Loss& job) {
  const int64_t rows = job.hidden.sides, kept = rows_kept(job), together = kept != 0 ? kept : rows;
  int64_t first = 0;
  do {
    Loss part = job;
    const int64_t bytes = job.hidden.element == kFloat ? 4 : 2;
    part.hidden.data += first * job.hidden.side * bytes;
    part.hidden.sides = std::min(together, rows - first);
    part.targets += first;
    part.losses += first;
    if (job.of_hidden != nullptr) part.of_hidden += first * job.hidden.inners;
    LossRun(part, kept != 0, first > 0).run();
    first += together;
  } while (first < rows);
}

}  // namespace flatout

extern "C" {

// Whether all targets are classes; if not, nothing is computed.
int64_t flatout_linear_loss(const flatout::Loss* job) {
  for (int64_t row = 0; row < job->hidden.sides; ++row) {
    const int64_t target = job->targets[row];
    if (target != flatout::kIgnored && (target < 0 || target >= job->weight.sides)) return 0;
  }
  flatout::has_matrix_units();
  flatout::run(*job);
  return 1;
}
}
