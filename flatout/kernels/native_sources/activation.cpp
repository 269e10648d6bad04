// GELU and its gradient, each in one pass over memory; torch's own for bf16 take several times as long as the reads.
//
// tanh form: x s(2u), s the logistic function, u = sqrt(2/pi) (x + 0.044715 x^3). erf form: x P(x), P the normal
// distribution's; 1 - P of |x| by the approximation 7.1.26 of Abramowitz and Stegun, whose error is below 1.5e-7.

#include <omp.h>

#include "matrix_units.h"

namespace flatout {

struct Elements {
  const void* x;
  const void* gradient;  // null: forward
  void* out;
  int64_t element;  // kFloat or kBfloat16, of all three
  int64_t count;
  int64_t by_tanh;
  int64_t threads;
};

inline Line load(const void* from, int64_t element, int64_t place) {
  return element == kFloat ? Line::load(static_cast<const float*>(from) + place)
                           : Line::load(static_cast<const uint16_t*>(from) + place);
}
inline void store(const Line& values, void* to, int64_t element, int64_t place) {
  if (element == kFloat)
    values.store(static_cast<float*>(to) + place);
  else
    values.store(static_cast<uint16_t*>(to) + place);
}

// gelu(x), or its slope
template <bool Slope>
inline Line by_tanh(const Line& x) {
  constexpr float kA = 1.5957691216f, kB = 0.044715f;  // 2 sqrt(2/pi)
  const Line one = Line::all(1.0f), zero = Line::all(0.0f), far = Line::all(-20.0f);  // beyond, all is 0 or 1
  const Line y = max(far, zero - max(far, zero - x)), square = y * y;
  const Line share = one / (one + (Line::all(-kA) * y * (one + Line::all(kB) * square)).exponential());
  if (!Slope) return x * share;
  return share + y * share * (one - share) * Line::all(kA) * (one + Line::all(3 * kB) * square);
}

template <bool Slope>
inline Line by_erf(const Line& x) {
  const Line one = Line::all(1.0f), size = max(x, Line::all(0.0f) - x);
  const Line bell = (Line::all(-0.5f) * x * x).exponential();
  const Line t = one / (one + Line::all(0.3275911f * 0.70710678f) * size);
  Line tail = Line::all(1.061405429f);
  for (const float term : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) tail = tail * t + Line::all(term);
  tail = Line::all(0.5f) * tail * t * bell;  // 1 - P(|x|)
  const Line below = choose_negative(x, tail, one - tail);
  return Slope ? below + x * bell * Line::all(0.39894228f) : x * below;
}

template <Line (*Value)(const Line&), Line (*Slope)(const Line&)>
void run(const Elements& job) {
  constexpr int64_t kRun = 4096;
#pragma omp parallel for num_threads(job.threads) schedule(static)
  for (int64_t first = 0; first < job.count; first += kRun) {
    const int64_t end = std::min(first + kRun, job.count);
    for (int64_t i = first; i < end; i += kSide) {
      const int64_t real = std::min(kSide, end - i), bytes = job.element == kFloat ? 4 : 2;
      float part[kSide] = {}, gradient[kSide] = {}, out[kSide];
      const void *x = job.x, *g = job.gradient;
      void* to = job.out;
      int64_t place = i;
      if (real < kSide) {  // the last numbers, with zeros behind them
        std::memcpy(part, static_cast<const char*>(x) + i * bytes, real * bytes);
        if (g != nullptr) std::memcpy(gradient, static_cast<const char*>(g) + i * bytes, real * bytes);
        x = part, g = g == nullptr ? nullptr : gradient, to = out, place = 0;
      }
      const Line values = load(x, job.element, place);
      store(g == nullptr ? Value(values) : Slope(values) * load(g, job.element, place), to, job.element, place);
      if (real < kSide) std::memcpy(static_cast<char*>(job.out) + i * bytes, out, real * bytes);
    }
  }
}

}  // namespace flatout

extern "C" void flatout_gelu(const flatout::Elements* job) {
  using namespace flatout;
  if (job->by_tanh)
    run<by_tanh<false>, by_tanh<true>>(*job);
  else
    run<by_erf<false>, by_erf<true>>(*job);
}
