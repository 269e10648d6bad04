// What torch's CUDA build asks of NCCL and FakeGPU's lacks. Preloaded before FakeGPU's own library.
#include "nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace {

thread_local int depth = 0;  // of groups

// Between GroupStart and GroupEnd the order of sends and receives does not matter to NCCL. FakeGPU makes them one after
// the other, so both sides of each pair make theirs in one order: by pair, and from the lower rank to the higher first.
struct PointToPoint {
  std::tuple<int, int, bool> place;  // lower rank, higher rank, from the higher to the lower
  std::function<ncclResult_t()> made;
};
thread_local std::vector<PointToPoint> between_two;

// Ranks that are GPUs of one process (torch.nn.DataParallel): one thread calls for all of them within a group. FakeGPU's
// would wait for each other; here the calls are kept, and made at the group's end, in this process alone.
struct LocalRank {
  int rank, ranks;
};
std::mutex local_lock;
std::set<ncclComm_t> local_ranks;

struct LocalCall {
  const void* sent;
  void* received;
  size_t count;
  ncclDataType_t type;
  bool reduces;
  int root;
};
thread_local std::vector<std::vector<LocalCall>> local_calls;  // of each rank, in its order

size_t bytes_of(ncclDataType_t type) {
  static constexpr size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // in the order of ncclDataType_t
  return BYTES[type];
}

struct Bf16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  void operator+=(float other) {
    const float sum = *this + other;
    uint32_t wide;
    memcpy(&wide, &sum, sizeof wide);
    bits = static_cast<uint16_t>((wide + 0x7FFF + (wide >> 16 & 1)) >> 16);
  }
};

template <typename Number>
void add(void* to, const void* from, size_t count) {
  for (size_t i = 0; i < count; i++) static_cast<Number*>(to)[i] += static_cast<const Number*>(from)[i];
}

ncclResult_t add(void* to, const void* from, size_t count, ncclDataType_t type) {
  switch (type) {
    case ncclFloat64: add<double>(to, from, count); return ncclSuccess;
    case ncclFloat32: add<float>(to, from, count); return ncclSuccess;
    case ncclFloat16: add<_Float16>(to, from, count); return ncclSuccess;
    case ncclBfloat16: add<Bf16>(to, from, count); return ncclSuccess;
    case ncclInt64: add<int64_t>(to, from, count); return ncclSuccess;
    case ncclInt32: add<int32_t>(to, from, count); return ncclSuccess;
    default: return ncclInvalidArgument;
  }
}

// The calls that belong together: the same one of each rank.
ncclResult_t make(const std::vector<LocalCall>& calls) {
  const LocalCall& root = calls[calls[0].root];
  const size_t bytes = root.count * bytes_of(root.type);
  std::vector<char> sum(static_cast<const char*>(root.sent), static_cast<const char*>(root.sent) + bytes);
  for (auto& one : calls) {
    if (one.count != root.count || one.type != root.type || one.reduces != root.reduces) return ncclInvalidUsage;
    if (!one.reduces) {
      memcpy(one.received, sum.data(), bytes);
    } else if (&one != &root) {
      if (const auto result = add(sum.data(), one.sent, one.count, one.type)) return result;
    }
  }
  if (root.reduces) memcpy(root.received, sum.data(), bytes);
  return ncclSuccess;
}

ncclResult_t make_local_calls() {
  const auto every = std::exchange(local_calls, {});
  for (size_t i = 0; !every.empty() && i < every[0].size(); i++) {
    std::vector<LocalCall> together;
    for (auto& of_rank : every) {
      if (of_rank.size() != every[0].size()) return ncclInvalidUsage;
      together.push_back(of_rank[i]);
    }
    if (const auto result = make(together)) return result;
  }
  return ncclSuccess;
}

// False: it is not of this process.
bool keep(ncclComm_t group, const LocalCall& call) {
  std::lock_guard<std::mutex> guard(local_lock);
  if (!local_ranks.count(group)) return false;
  const auto* local = reinterpret_cast<LocalRank*>(group);
  local_calls.resize(local->ranks);
  local_calls[local->rank].push_back(call);
  return true;
}

template <typename Function>
Function* fakegpu(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
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

ncclResult_t ncclCommInitAll(ncclComm_t* made, int count, const int*) {
  std::lock_guard<std::mutex> guard(local_lock);
  for (int rank = 0; rank < count; rank++) {
    made[rank] = reinterpret_cast<ncclComm_t>(new LocalRank{rank, count});
    local_ranks.insert(made[rank]);
  }
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t group) {
  {
    std::lock_guard<std::mutex> guard(local_lock);
    if (local_ranks.erase(group)) return ncclSuccess;
  }
  return NEXT(ncclCommDestroy)(group);
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
  if (--depth == 0 && result == ncclSuccess) result = make_local_calls();
  return result;
}

ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t group, cudaStream_t stream) {
  if (keep(group, {data, data, count, type, false, root})) return ncclSuccess;
  return NEXT(ncclBcast)(data, count, type, root, group, stream);
}

ncclResult_t ncclReduce(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                        int root, ncclComm_t group, cudaStream_t stream) {
  if (operation == ncclSum && keep(group, {sent, received, count, type, true, root})) return ncclSuccess;
  return NEXT(ncclReduce)(sent, received, count, type, operation, root, group, stream);
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
  int rank = 0, ranks = 0;
  ncclCommUserRank(group, &rank);
  ncclCommCount(group, &ranks);
  ncclGroupStart();
  ncclSend(sent, count, type, root, group, stream);
  for (int other = 0; rank == root && other < ranks; other++) {
    ncclRecv(static_cast<char*>(received) + other * count * bytes_of(type), count, type, other, group, stream);
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
