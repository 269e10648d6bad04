// A stage of work shared by threads that do not wait for each other, only for each other's tasks.
//
// A barrier waits until every thread arrives, also one that the system has put aside for some milliseconds with nothing
// to do; on a busy machine a pass of sixty barriers then takes a hundred times as long. Here a stage is over when its
// tasks are done. A thread that comes late finds no task left and goes on to where the others are.
//
// Why a late thread reads nothing wrong: what a stage reads is overwritten only by later stages, which begin when all
// its tasks are done; so whoever still got a task read its inputs in time, and whoever got none throws them away.

#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

namespace flatout {

class Stage {
 public:
  // `work` takes tasks by `share`, until none is left; then waits for those that others took.
  template <typename Work>
  void run(int64_t tasks, const Work& work) {
    if (next_.load(std::memory_order_relaxed) < tasks) work();
    for (int spins = 0; done_.load(std::memory_order_acquire) < tasks; ++spins) pause(spins);
  }

  // Runs of `chunk` tasks out of 0 .. tasks - 1 for this thread.
  template <typename Use>
  void share(int64_t tasks, int64_t chunk, const Use& use) {
    for (;;) {
      const int64_t first = next_.fetch_add(chunk, std::memory_order_acq_rel);
      if (first >= tasks) return;
      const int64_t end = std::min(first + chunk, tasks);
      for (int64_t task = first; task < end; ++task) use(task);
      done_.fetch_add(end - first, std::memory_order_release);
    }
  }

 private:
  // Waits are some microseconds, as long as nobody is put aside; then others may have the processor.
  static void pause(int spins) {
    if (spins > 20000) {
      std::this_thread::yield();
      return;
    }
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Each in a cache line of its own: one is written by who takes tasks, the other read by who waits.
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace flatout
