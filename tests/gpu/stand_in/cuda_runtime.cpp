// What FakeGPU's runtime of CUDA 12 lacks for torch's CUDA 13 build: device properties in their new layout, graphs that
// can be captured and replayed, and events timed by a clock. Preloaded before FakeGPU's own libraries.
#include "driver_types.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

int number(const char* name, const char* otherwise) { return atoi(setting(name, otherwise)); }

int nothing() { return 0; }

std::atomic<int> last_graph{0};
std::atomic<int> captured_graph{0};  // 0: no capture is under way
cudaStream_t captured_stream = nullptr;
void (*replay_graph)(int) = nullptr;
long (*count_nodes)(int) = nullptr;

std::mutex events_lock;
std::unordered_map<cudaEvent_t, double> event_milliseconds;
std::atomic<long> last_event{0};

double now_milliseconds() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

}  // namespace

extern "C" {

// CUDA_VISIBLE_DEVICES is read once, when CUDA starts. GPUs are alike, so how many it names is all that matters here.
cudaError_t cudaGetDeviceCount(int* count) {
  static const int named = [] {
    const char* list = getenv("CUDA_VISIBLE_DEVICES");
    return !list ? 1 << 30 : !*list ? 0 : static_cast<int>(std::count(list, list + strlen(list), ',')) + 1;
  }();
  static const auto all = reinterpret_cast<cudaError_t (*)(int*)>(dlsym(RTLD_NEXT, "cudaGetDeviceCount"));
  const cudaError_t result = all(count);
  *count = std::min(*count, named);
  return result == cudaSuccess && !*count ? cudaErrorNoDevice : result;
}

// Device properties

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  strncpy(p->name, setting("STAND_IN_NAME", "Fake NVIDIA GeForce RTX 4090"), sizeof p->name - 1);
  for (int i = 0; i < 16; i++) p->uuid.bytes[i] = static_cast<char>(i + 1 + device);
  p->totalGlobalMem = strtoull(setting("STAND_IN_BYTES", "25769803776"), nullptr, 10);
  p->major = number("STAND_IN_MAJOR", "8");
  p->minor = number("STAND_IN_MINOR", "9");
  p->multiProcessorCount = number("STAND_IN_MULTIPROCESSORS", "128");
  p->maxThreadsPerMultiProcessor = number("STAND_IN_THREADS", "1536");
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxBlocksPerMultiProcessor = 24;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 101376;
  p->sharedMemPerMultiprocessor = 102400;
  p->totalConstMem = 65536;
  p->l2CacheSize = 75497472;
  p->memPitch = 2147483647;
  p->memoryBusWidth = 384;
  p->textureAlignment = 512;
  p->unifiedAddressing = p->managedMemory = p->canMapHostMemory = 1;
  p->concurrentKernels = p->streamPrioritiesSupported = 1;
  p->asyncEngineCount = 2;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (!*function) *function = reinterpret_cast<void*>(nothing);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// Fused attention looks whether its kernels were built for this GPU.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->binaryVersion = attributes->ptxVersion = 10 * number("STAND_IN_MAJOR", "8");
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->maxDynamicSharedSizeBytes = 101376;
  return cudaSuccess;
}

// torch gives its ranks streams of a priority of their own.
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

// Graphs: a graph is a number; the executor keeps what was recorded under it.

int stand_in_captured_graph() { return captured_graph; }

void stand_in_set_graphs(void (*replay)(int), long (*count)(int)) {
  replay_graph = replay;
  count_nodes = count;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  captured_stream = stream;
  captured_graph = ++last_graph;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(static_cast<long>(captured_graph.exchange(0)));
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool capturing = captured_graph && stream == captured_stream;
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = captured_graph;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(static_cast<long>(captured_graph));
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(made, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  if (replay_graph) replay_graph(static_cast<int>(reinterpret_cast<long>(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = count_nodes ? count_nodes(static_cast<int>(reinterpret_cast<long>(graph))) : 1;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

// Events: all work is done when a call returns, so an event is the time at which it was recorded.

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(0x1000 + 8 * ++last_event);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::lock_guard<std::mutex> guard(events_lock);
  event_milliseconds.erase(event);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  std::lock_guard<std::mutex> guard(events_lock);
  event_milliseconds[event] = now_milliseconds();
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  std::lock_guard<std::mutex> guard(events_lock);
  if (!event_milliseconds.count(start) || !event_milliseconds.count(end)) return cudaErrorInvalidResourceHandle;
  *milliseconds = static_cast<float>(event_milliseconds[end] - event_milliseconds[start]);
  return cudaSuccess;
}

}  // extern "C"
