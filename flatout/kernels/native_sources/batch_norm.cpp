// Batch normalisation in training, with the addition and the ReLU that follow it, in as few passes over memory as the
// sums allow.
//
//   forward    one pass for mean and variance; one that reads x (and the addend) and writes the result
//   backward   one pass for the two sums over the gradient; one that writes the gradients
//
// torch takes a pass more for the variance, and two or three for each of addition, ReLU and its gradient.
//
// Numbers are taken in lines of 32 (`Line`), in one of two layouts:
//
//   channels last   Channels lie next to each other, in rows. Rows whose length is no multiple of 32 are taken several at
//                   a time, as one wide row; the rows left over at the end are taken number by number.
//   planes          The numbers of a channel of one sample lie next to each other. What is left over at the end of a
//                   plane is taken number by number.

#include <omp.h>

#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "bf16_products.h"

namespace flatout {

struct Normalisation {
  const void* x;         // [rows, channels] or [rows / plane, channels, plane], like all others of `element`
  const void* addend;    // or null
  void* out;             // backward: the result, read where there was an addend; else null
  const void* gradient;  // backward: of the result
  void* of_x;            // backward: null where none is wanted
  void* of_addend;       // backward: null where none is wanted, or where it is that of the result
  const float* weight;   // [channels], or null for 1
  const float* bias;     // [channels], or null for 0
  float* statistics;     // [5, channels]: see below
  float* of_weight;      // backward: [channels]
  float* of_bias;        // backward: [channels]
  int64_t element;       // kFloat or kBfloat16
  int64_t rows;
  int64_t channels;
  int64_t plane;         // numbers of a plane; 0: channels last
  int64_t rectified;     // is ReLU applied to the sum?
  double epsilon;
  int64_t threads;
};

namespace {

// Of a channel: mean, variance, deviation = 1 / sqrt(variance + epsilon), and what the result is made with:
// (x - mean) scale + bias. (As x scale + shift it would cancel out in a channel whose mean is far from 0.) Kept as they
// are when the layer is called, whatever becomes of its weight and bias.
enum Statistic { kMean, kVariance, kDeviation, kScale, kBias };

inline float* of(const Normalisation& job, Statistic one) { return job.statistics + one * job.channels; }

constexpr int64_t kBlock = 128;  // lines that are summed up in fp32, before the sum goes into one in fp64
constexpr int64_t kGroups = 64;  // sums in fp64 at most

inline float value(const float* from) { return *from; }
inline float value(const uint16_t* from) { return from_bf16(*from); }
inline void put(float value, float* to) { *to = value; }
inline void put(float value, uint16_t* to) { *to = to_bf16(value); }

// Channels last: `count` wide rows of `width` numbers, then the rows from `rest` on.
struct Rows {
  int64_t channels, rows, threads, repeats, width, count, rest;

  explicit Rows(const Normalisation& job) : channels(job.channels), rows(job.rows), threads(job.threads) {
    repeats = kSide / std::gcd(channels, kSide);
    width = repeats * channels;
    count = rows / repeats;
    rest = count * repeats;
  }

  // One number of each channel, as `line` takes them.
  std::vector<float> spread(const float* values) const {
    std::vector<float> all;
    all.reserve(width);
    for (int64_t i = 0; i < repeats; ++i) all.insert(all.end(), values, values + channels);
    return all;
  }
  static Line line(const std::vector<float>& spread, int64_t place) { return Line::load(spread.data() + place); }

  // Where the number of this channel in a row is.
  int64_t at(int64_t row, int64_t channel) const { return row * channels + channel; }

  // Every line by `lines(at, place)`, every number beyond by `single(at, channel)`.
  template <typename Lines, typename Single>
  void pass(const Lines& lines, const Single& single) const {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < count; ++row)
      for (int64_t place = 0; place < width; place += kSide) lines(row * width + place, place);
    for (int64_t row = rest; row < rows; ++row)
      for (int64_t channel = 0; channel < channels; ++channel) single(row * channels + channel, channel);
  }

  // Two sums for each channel, to which `lines` and `single` add. They do not depend on the number of threads.
  template <typename Lines, typename Single>
  void sum_up(const Lines& lines, const Single& single, std::vector<double>& first, std::vector<double>& second) const {
    const int64_t blocks = (count + kBlock - 1) / kBlock, groups = std::min(blocks, kGroups);
    std::vector<double> parts(2 * groups * width, 0.0);
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> sums(2 * width);
#pragma omp for schedule(static)
      for (int64_t group = 0; group < groups; ++group) {
        double* part = parts.data() + 2 * group * width;
        for (int64_t block = blocks * group / groups; block < blocks * (group + 1) / groups; ++block) {
          std::fill(sums.begin(), sums.end(), 0.0f);
          const int64_t end = std::min((block + 1) * kBlock, count);
          for (int64_t row = block * kBlock; row < end;) {
            const int64_t taken = std::min<int64_t>(4, end - row);  // at a time, while sums stay in registers
            for (int64_t place = 0; place < width; place += kSide) {
              Line one = Line::load(sums.data() + place), two = Line::load(sums.data() + width + place);
              for (int64_t i = 0; i < taken; ++i) lines((row + i) * width + place, place, one, two);
              one.store(sums.data() + place);
              two.store(sums.data() + width + place);
            }
            row += taken;
          }
          for (int64_t i = 0; i < 2 * width; ++i) part[i] += sums[i];
        }
      }
    }
    first.assign(channels, 0.0);
    second.assign(channels, 0.0);
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t place = 0; place < width; ++place) {
        first[place % channels] += parts[2 * group * width + place];
        second[place % channels] += parts[(2 * group + 1) * width + place];
      }
    for (int64_t row = rest; row < rows; ++row)
      for (int64_t channel = 0; channel < channels; ++channel) {
        float one = 0.0f, two = 0.0f;
        single(row * channels + channel, channel, one, two);
        first[channel] += one;
        second[channel] += two;
      }
  }
};

// The same for planes; a line's place is its channel.
struct Planes {
  int64_t channels, plane, count, threads;

  explicit Planes(const Normalisation& job)
      : channels(job.channels), plane(job.plane), count(job.rows / job.plane * job.channels), threads(job.threads) {}

  std::vector<float> spread(const float* values) const { return {values, values + channels}; }
  static Line line(const std::vector<float>& spread, int64_t place) { return Line::all(spread[place]); }

  int64_t at(int64_t row, int64_t channel) const { return (row / plane * channels + channel) * plane + row % plane; }

  template <typename Lines, typename Single>
  void pass(const Lines& lines, const Single& single) const {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t one = 0; one < count; ++one) {
      const int64_t begin = one * plane, end = begin + plane, channel = one % channels;
      int64_t at = begin;
      for (; at + kSide <= end; at += kSide) lines(at, channel);
      for (; at < end; ++at) single(at, channel);
    }
  }

  template <typename Lines, typename Single>
  void sum_up(const Lines& lines, const Single& single, std::vector<double>& first, std::vector<double>& second) const {
    std::vector<double> parts(2 * count, 0.0);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t one = 0; one < count; ++one) {
      const int64_t begin = one * plane, end = begin + plane, channel = one % channels;
      int64_t at = begin;
      while (at + kSide <= end) {
        Line sums[2] = {Line::all(0.0f), Line::all(0.0f)}, others[2] = {Line::all(0.0f), Line::all(0.0f)};
        const int64_t stop = std::min(end, at + kBlock * kSide);
        for (; at + 2 * kSide <= stop; at += 2 * kSide) {
          lines(at, channel, sums[0], sums[1]);
          lines(at + kSide, channel, others[0], others[1]);
        }
        for (; at + kSide <= stop; at += kSide) lines(at, channel, sums[0], sums[1]);
        for (int i = 0; i < 2; ++i) parts[2 * one + i] += (sums[i] + others[i]).sum();
      }
      for (; at < end; ++at) {
        float sum = 0.0f, other = 0.0f;
        single(at, channel, sum, other);
        parts[2 * one] += sum;
        parts[2 * one + 1] += other;
      }
    }
    first.assign(channels, 0.0);
    second.assign(channels, 0.0);
    for (int64_t one = 0; one < count; ++one) {
      first[one % channels] += parts[2 * one];
      second[one % channels] += parts[2 * one + 1];
    }
  }
};

// Mean and variance of each channel, and what follows from them.
template <typename T, typename Layout>
void measure(const Normalisation& job) {
  const Layout layout(job);
  const T* x = static_cast<const T*>(job.x);
  // Sums of x and x^2 about a number near the mean: about 0, those of a channel far from 0 would cancel out. It is the
  // median of some numbers from places without a period, as a few may be far from all others (corners of images).
  std::vector<float> near(job.channels, 0.0f);
  constexpr int64_t kProbes = 15;
  for (int64_t channel = 0; channel < job.channels; ++channel) {
    float probes[kProbes];
    for (int64_t i = 0; i < kProbes; ++i) {
      const double turn = 0.6180339887 * (i + 1);
      const int64_t row = std::min(job.rows - 1, static_cast<int64_t>((turn - std::floor(turn)) * job.rows));
      const float probe = value(x + layout.at(row, channel));
      probes[i] = std::isfinite(probe) ? probe : 0.0f;
    }
    std::nth_element(probes, probes + kProbes / 2, probes + kProbes);
    near[channel] = probes[kProbes / 2];
  }
  const auto wide_near = layout.spread(near.data());
  std::vector<double> sums, squares;
  layout.sum_up(
      [&](int64_t at, int64_t place, Line& sum, Line& square) {
        const Line apart = Line::load(x + at) - Layout::line(wide_near, place);
        sum = sum + apart;
        square = square + apart * apart;
      },
      [&](int64_t at, int64_t channel, float& sum, float& square) {
        sum = value(x + at) - near[channel];
        square = sum * sum;
      },
      sums, squares);
  for (int64_t channel = 0; channel < job.channels; ++channel) {
    const double apart = sums[channel] / job.rows, spread = squares[channel] / job.rows - apart * apart;
    const double variance = spread < 0.0 ? 0.0 : spread;  // NaN stays NaN
    const float mean = near[channel] + apart, deviation = 1.0 / std::sqrt(variance + job.epsilon);
    of(job, kMean)[channel] = mean;
    of(job, kVariance)[channel] = variance;
    of(job, kDeviation)[channel] = deviation;
    of(job, kScale)[channel] = (job.weight == nullptr ? 1.0f : job.weight[channel]) * deviation;
    of(job, kBias)[channel] = job.bias == nullptr ? 0.0f : job.bias[channel];
  }
}

// Mean, scale and bias of every channel, spread as the layout's lines take them.
template <typename Layout>
struct Channels {
  const float *means, *scales, *biases;
  std::vector<float> wide_means, wide_scales, wide_biases;

  Channels(const Normalisation& job, const Layout& layout)
      : means(of(job, kMean)), scales(of(job, kScale)), biases(of(job, kBias)), wide_means(layout.spread(means)),
        wide_scales(layout.spread(scales)), wide_biases(layout.spread(biases)) {}

  Line apart(const Line& x, int64_t place) const { return x - Layout::line(wide_means, place); }
  Line normalised(const Line& x, int64_t place) const {
    return apart(x, place) * Layout::line(wide_scales, place) + Layout::line(wide_biases, place);
  }
  float normalised(float x, int64_t channel) const { return (x - means[channel]) * scales[channel] + biases[channel]; }
};

// The normalised x (+ addend), then ReLU, which lets NaN pass as torch's does
template <typename T, typename Layout, bool kAdded, bool kRectified>
void normalise(const Normalisation& job) {
  const Layout layout(job);
  const T *x = static_cast<const T*>(job.x), *addend = static_cast<const T*>(job.addend);
  T* out = static_cast<T*>(job.out);
  const Channels<Layout> channels(job, layout);
  const Line zero = Line::all(0.0f);
  layout.pass(
      [&](int64_t at, int64_t place) {
        Line y = channels.normalised(Line::load(x + at), place);
        if (kAdded) y = y + Line::load(addend + at);
        if (kRectified) y = max(zero, y);
        y.store(out + at);
      },
      [&](int64_t at, int64_t channel) {
        float y = channels.normalised(value(x + at), channel);
        if (kAdded) y += value(addend + at);
        put(kRectified && y <= 0.0f ? 0.0f : y, out + at);
      });
}

// The gradient behind ReLU: with an addend by the result's sign, without one by that of the normalised x.
enum Mask { kNone, kByResult, kByInput };

template <typename T, typename Layout, Mask kMask>
void backward(const Normalisation& job) {
  const Layout layout(job);
  const T *x = static_cast<const T*>(job.x), *gradient = static_cast<const T*>(job.gradient);
  const T* out = static_cast<const T*>(job.out);
  T *of_x = static_cast<T*>(job.of_x), *of_addend = static_cast<T*>(job.of_addend);
  const Channels<Layout> channels(job, layout);

  const auto passed = [&](int64_t at, int64_t place, const Line& input) {
    const Line all = Line::load(gradient + at);
    if (kMask == kNone) return all;
    return where_positive(kMask == kByResult ? Line::load(out + at) : channels.normalised(input, place), all);
  };
  const auto passed_single = [&](int64_t at, int64_t channel) {
    if (kMask == kNone) return value(gradient + at);
    const float sign = kMask == kByResult ? value(out + at) : channels.normalised(value(x + at), channel);
    return sign <= 0.0f ? 0.0f : value(gradient + at);
  };

  std::vector<double> sums, products;  // of the gradient, and of gradient (x - mean)
  const bool kept = of_addend != nullptr;  // then the second pass reads what the first one wrote
  layout.sum_up(
      [&](int64_t at, int64_t place, Line& sum, Line& product) {
        const Line input = Line::load(x + at), one = passed(at, place, input);
        if (kept) one.store(of_addend + at);
        sum = sum + one;
        product = product + one * channels.apart(input, place);
      },
      [&](int64_t at, int64_t channel, float& sum, float& product) {
        sum = passed_single(at, channel);
        if (kept) put(sum, of_addend + at);
        product = sum * (value(x + at) - channels.means[channel]);
      },
      sums, products);

  std::vector<float> slopes(job.channels), offsets(job.channels);
  for (int64_t channel = 0; channel < job.channels; ++channel) {
    const double deviation = of(job, kDeviation)[channel];
    job.of_bias[channel] = sums[channel];
    job.of_weight[channel] = products[channel] * deviation;
    slopes[channel] = -channels.scales[channel] * deviation * deviation * products[channel] / job.rows;
    offsets[channel] = -channels.scales[channel] * sums[channel] / job.rows;
  }
  if (of_x == nullptr) return;
  const auto wide_slopes = layout.spread(slopes.data()), wide_offsets = layout.spread(offsets.data());
  layout.pass(
      [&](int64_t at, int64_t place) {
        const Line input = Line::load(x + at);
        const Line one = kept ? Line::load(of_addend + at) : passed(at, place, input);
        const Line sloped = channels.apart(input, place) * Layout::line(wide_slopes, place);
        (one * Layout::line(channels.wide_scales, place) + Layout::line(wide_offsets, place) + sloped).store(of_x + at);
      },
      [&](int64_t at, int64_t channel) {
        const float one = kept ? value(of_addend + at) : passed_single(at, channel);
        const float sloped = (value(x + at) - channels.means[channel]) * slopes[channel];
        put(one * channels.scales[channel] + offsets[channel] + sloped, of_x + at);
      });
}

template <typename T, typename Layout>
void normalise(const Normalisation& job) {
  if (job.addend != nullptr)
    job.rectified ? normalise<T, Layout, true, true>(job) : normalise<T, Layout, true, false>(job);
  else
    job.rectified ? normalise<T, Layout, false, true>(job) : normalise<T, Layout, false, false>(job);
}

template <typename T, typename Layout>
void backward(const Normalisation& job) {
  if (!job.rectified)
    backward<T, Layout, kNone>(job);
  else if (job.out != nullptr)
    backward<T, Layout, kByResult>(job);
  else
    backward<T, Layout, kByInput>(job);
}

}  // namespace
}  // namespace flatout

#define FLATOUT_FOR_EACH(work, job)                                                                      \
  if (job.element == flatout::kFloat)                                                                    \
    job.plane ? flatout::work<float, flatout::Planes>(job) : flatout::work<float, flatout::Rows>(job);   \
  else                                                                                                   \
    job.plane ? flatout::work<uint16_t, flatout::Planes>(job) : flatout::work<uint16_t, flatout::Rows>(job)

extern "C" void flatout_measure_batch(const flatout::Normalisation* job) { FLATOUT_FOR_EACH(measure, (*job)); }
extern "C" void flatout_normalise_batch(const flatout::Normalisation* job) { FLATOUT_FOR_EACH(normalise, (*job)); }
extern "C" void flatout_normalise_batch_gradients(const flatout::Normalisation* job) {
  FLATOUT_FOR_EACH(backward, (*job));
}
