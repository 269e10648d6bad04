// The products of a linear layer in training: outputs, gradients of inputs and gradients of weights.
//
// One side's strips are packed by the thread that uses them and stay in its cache; the other side passes by. The inner
// dimension is never split, so a result is the same to the bit for any number of threads.

#include <omp.h>

#include "bf16_products.h"

namespace flatout {

struct Product {
  Side left, right;
  void* out;  // [left's sides, right's sides]
  int64_t out_element, out_stride;
  const float* bias;  // [columns], or null
  int64_t threads;
};

// 32 sums into a row of the result.
inline void store_line(const Product& job, const float* line, int64_t row, int64_t column) {
  const int64_t columns = std::min(kSide, job.right.sides - column), place = row * job.out_stride + column;
  float* wide = static_cast<float*>(job.out) + place;
  uint16_t* narrow = static_cast<uint16_t*>(job.out) + place;
  if (columns == kSide) {
    Line values = Line::load(line);
    if (job.bias != nullptr) values = values + Line::load(job.bias + column);
    if (job.out_element == kFloat)
      values.store_past_caches(wide);
    else
      values.store(narrow);
    return;
  }
  for (int64_t j = 0; j < columns; ++j) {
    const float value = line[j] + (job.bias != nullptr ? job.bias[column + j] : 0.0f);
    if (job.out_element == kFloat)
      wide[j] = value;
    else
      narrow[j] = to_bf16(value);
  }
}

// Blocks of sums, next to each other, into the result: `wide` of them along its rows, or else down its columns.
inline void store(const Product& job, const float* sums, int64_t left, int64_t right, int64_t count, bool wide) {
  const int64_t blocks = wide ? count : 1;
  for (int64_t down = 0; down < (wide ? 1 : count); ++down) {
    const int64_t first = (left + down) * kSide, rows = std::min(kSide, job.left.sides - first);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t block = 0; block < blocks; ++block) {
        const float* line = sums + (down + block) * kStep + i * kSide;
        store_line(job, line, first + i, (right + block) * kSide);
      }
    }
  }
}

template <bool RightStays>
void run(const Product& job) {
  const Side& passing = RightStays ? job.left : job.right;
  const Side& resident = RightStays ? job.right : job.left;
  const int64_t steps = steps_of(passing.inners), size = steps * kStep;
  const int64_t turns = steps_of(passing.sides), strips = steps_of(resident.sides);
  const int64_t group = strips_of_a_task(strips, steps, job.threads);
  // What passes by is packed a chunk at a time, again for each task, if a strip's memory is contiguous. Otherwise its
  // rows are read whole, once.
  static thread_local Scratch of_passing;
  uint16_t* const whole = passing.inner == 1 ? nullptr : of_passing.halves(turns * size);
#pragma omp parallel num_threads(job.threads)
  {
    static thread_local Scratch of_strips, of_sums;
    uint16_t* packed = of_strips.halves(group * size);
    float* sums = of_sums.floats(group * kStep);
    alignas(64) uint16_t chunk[kChunk * kStep];
    Tiles tiles;
    if (whole != nullptr) {
#pragma omp for schedule(static)
      for (int64_t step = 0; step < steps; ++step)
        pack<!RightStays>(passing, 0, turns, step, step + 1, whole + step * kStep, size);
    }
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < strips; first += group) {
      const int64_t count = std::min(group, strips - first);
      pack<RightStays>(resident, first, count, 0, steps, packed, size);
      for (int64_t turn = 0; turn < turns; ++turn) {
        for (int64_t step = 0; step < steps; step += kChunk) {
          const int64_t end = std::min(step + kChunk, steps);
          const uint16_t* part = chunk;
          if (whole != nullptr)
            part = whole + turn * size + step * kStep;
          else
            pack<!RightStays>(passing, turn, 1, step, end, chunk);
          for (int64_t i = 0; i < count; ++i) {
            const uint16_t* other = packed + i * size + step * kStep;
            multiply(RightStays ? part : other, RightStays ? other : part, end - step, sums + i * kStep, step > 0);
          }
        }
        store(job, sums, RightStays ? turn : first, RightStays ? first : turn, count, RightStays);
      }
    }
  }
}

// Sums of each column of [left's sides, left's inner] into `out`: the gradient of a bias. Rows are read whole.
void add_rows(const Side& rows, float* out, int64_t threads) {
  std::fill_n(out, rows.inners, 0.0f);
  const int64_t strips = steps_of(rows.inners), share = (strips + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t thread = 0; thread < threads; ++thread) {
    const int64_t first = thread * share * kSide, end = std::min((thread + 1) * share * kSide, rows.inners);
    for (int64_t row = 0; row < rows.sides; ++row) {
      const int64_t place = row * rows.side;
      const float* wide = reinterpret_cast<const float*>(rows.data) + place;
      const uint16_t* narrow = reinterpret_cast<const uint16_t*>(rows.data) + place;
      int64_t c = first;
      for (; c + kSide <= end; c += kSide)
        (Line::load(out + c) + (rows.element == kFloat ? Line::load(wide + c) : Line::load(narrow + c))).store(out + c);
      for (; c < end; ++c) out[c] += rows.element == kFloat ? wide[c] : from_bf16(narrow[c]);
    }
  }
}

}  // namespace flatout

extern "C" {

int64_t flatout_has_matrix_units() { return flatout::has_matrix_units() ? 1 : 0; }

// A matrix whose rows are contiguous.
void flatout_add_rows(const flatout::Side* rows, float* out, int64_t threads) { flatout::add_rows(*rows, out, threads); }

void flatout_matrix_product(const flatout::Product* job) {
  flatout::has_matrix_units();
  if (job->left.inner == 1)
    flatout::run<true>(*job);
  else
    flatout::run<false>(*job);
}
}
