// GELU in its tanh form and its gradient, each in one pass over memory.
//
// Its tanh form is x s(2u), s the logistic function, u = sqrt(2/pi) (x + 0.044715 x^3).

#include <omp.h>

#include "bf16_products.h"

namespace flatout {

struct Elements {
  const void* x;
  const void* gradient;  // null: forward
  void* out;
  int64_t element;  // kFloat or kBfloat16, of all three
  int64_t count;
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
inline Line gelu(const Line& x) {
  constexpr float kA = 1.5957691216f, kB = 0.044715f;  // 2 sqrt(2/pi)
  const Line one = Line::all(1.0f), zero = Line::all(0.0f), far = Line::all(-20.0f);  // beyond, all is 0 or 1
  const Line y = max(far, zero - max(far, zero - x)), square = y * y;
  const Line share = one / (one + (Line::all(-kA) * y * (one + Line::all(kB) * square)).exponential());
  if (!Slope) return x * share;
  return share + y * share * (one - share) * Line::all(kA) * (one + Line::all(3 * kB) * square);
}

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
      store(g == nullptr ? gelu<false>(values) : gelu<true>(values) * load(g, job.element, place), to, job.element, place);
      if (real < kSide) std::memcpy(static_cast<char*>(job.out) + i * bytes, out, real * bytes);
    }
  }
}

}  // namespace flatout

extern "C" void flatout_gelu_tanh(const flatout::Elements* job) { flatout::run(*job); }
