// What torch's CUDA build asks of NCCL and FakeGPU's lacks. Preloaded before FakeGPU's own library.
#include "nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace {

// Ranks that are GPUs of one process (torch.nn.DataParallel): one thread calls for all of them between GroupStart and
// GroupEnd, and FakeGPU's collectives wait for each other. Those calls are kept, and made by a thread for each rank.
std::mutex ranks_lock;
std::set<ncclComm_t> ranks_of_this_process;
thread_local int depth = 0;  // of groups
thread_local std::map<ncclComm_t, std::vector<std::function<ncclResult_t()>>> kept;

// Between GroupStart and GroupEnd the order of sends and receives does not matter to NCCL. FakeGPU makes them one after
// the other, so both sides of each pair make theirs in one order: by pair, and from the lower rank to the higher first.
struct PointToPoint {
  std::tuple<int, int, bool> place;  // lower rank, higher rank, from the higher to the lower
  std::function<ncclResult_t()> made;
};
thread_local std::vector<PointToPoint> between_two;

template <typename Function>
Function* fakegpu(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

bool of_this_process(ncclComm_t rank) {
  std::lock_guard<std::mutex> guard(ranks_lock);
  return ranks_of_this_process.count(rank);
}

ncclResult_t call(ncclComm_t rank, std::function<ncclResult_t()> made) {
  if (!depth || !of_this_process(rank)) return made();
  kept[rank].push_back(made);
  return ncclSuccess;
}

ncclResult_t call_between(ncclComm_t group, int peer, bool sends, std::function<ncclResult_t()> made) {
  if (!depth) return made();
  int rank = 0;
  ncclCommUserRank(group, &rank);
  between_two.push_back({{std::min(rank, peer), std::max(rank, peer), sends == (rank > peer)}, made});
  return ncclSuccess;
}

}  // namespace

#define NEXT(name) fakegpu(name, #name)

extern "C" {

ncclResult_t ncclCommInitAll(ncclComm_t* made, int count, const int* devices) {
  const ncclResult_t result = NEXT(ncclCommInitAll)(made, count, devices);
  std::lock_guard<std::mutex> guard(ranks_lock);
  if (result == ncclSuccess) ranks_of_this_process.insert(made, made + count);
  return result;
}

ncclResult_t ncclCommDestroy(ncclComm_t rank) {
  std::lock_guard<std::mutex> guard(ranks_lock);
  ranks_of_this_process.erase(rank);
  return NEXT(ncclCommDestroy)(rank);
}

ncclResult_t ncclGroupStart() {
  depth++;
  return NEXT(ncclGroupStart)();
}

ncclResult_t ncclGroupEnd() {
  ncclResult_t result = ncclSuccess;
  if (depth == 1) {
    const auto earlier = [](auto& one, auto& other) { return one.place < other.place; };
    std::stable_sort(between_two.begin(), between_two.end(), earlier);
    for (auto& one : std::exchange(between_two, {})) {
      if (result == ncclSuccess) result = one.made();
    }
  }
  const ncclResult_t ended = NEXT(ncclGroupEnd)();
  if (result == ncclSuccess) result = ended;
  if (--depth) return result;
  std::vector<std::thread> threads;
  std::vector<ncclResult_t> results(kept.size(), ncclSuccess);
  for (auto& [rank, calls] : kept) {
    threads.emplace_back([&calls, &one = results[threads.size()]] {
      for (auto& made : calls) {
        if (one == ncclSuccess) one = made();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  kept.clear();
  for (ncclResult_t one : results) {
    if (result == ncclSuccess) result = one;
  }
  return result;
}

ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t rank, cudaStream_t stream) {
  return call(rank, [=] { return NEXT(ncclBcast)(data, count, type, root, rank, stream); });
}

ncclResult_t ncclReduce(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                        int root, ncclComm_t rank, cudaStream_t stream) {
  return call(rank, [=] { return NEXT(ncclReduce)(sent, received, count, type, operation, root, rank, stream); });
}

ncclResult_t ncclSend(const void* sent, size_t count, ncclDataType_t type, int peer, ncclComm_t group,
                      cudaStream_t stream) {
  return call_between(group, peer, true, [=] { return NEXT(ncclSend)(sent, count, type, peer, group, stream); });
}

ncclResult_t ncclRecv(void* received, size_t count, ncclDataType_t type, int peer, ncclComm_t group,
                      cudaStream_t stream) {
  return call_between(group, peer, false, [=] { return NEXT(ncclRecv)(received, count, type, peer, group, stream); });
}

ncclResult_t ncclGather(const void* sent, void* received, size_t count, ncclDataType_t type, int root, ncclComm_t group,
                        cudaStream_t stream) {
  static constexpr size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // in the order of ncclDataType_t
  if (type < 0 || static_cast<size_t>(type) >= sizeof BYTES / sizeof *BYTES) return ncclInvalidArgument;
  int rank = 0, ranks = 0;
  ncclCommUserRank(group, &rank);
  ncclCommCount(group, &ranks);
  ncclGroupStart();
  ncclSend(sent, count, type, root, group, stream);
  for (int other = 0; rank == root && other < ranks; other++) {
    ncclRecv(static_cast<char*>(received) + other * count * BYTES[type], count, type, other, group, stream);
  }
  return ncclGroupEnd();
}

// Groups that grow, and windows of memory: no strategy uses them.
ncclResult_t ncclCommGrow(ncclComm_t, int, const ncclUniqueId*, int, ncclComm_t*, ncclConfig_t*) {
  return ncclInvalidUsage;
}
ncclResult_t ncclCommGetUniqueId(ncclComm_t, ncclUniqueId*) { return ncclInvalidUsage; }
ncclResult_t ncclCommRevoke(ncclComm_t, int) { return ncclInvalidUsage; }
ncclResult_t ncclWinGetUserPtr(ncclComm_t, ncclWindow_t, void**) { return ncclInvalidUsage; }

}  // extern "C"
