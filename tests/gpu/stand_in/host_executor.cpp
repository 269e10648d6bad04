// Runs every operation that torch registers for CUDA on the host, in the memory that a stand-in cudaMalloc took there.
//
// Allocator, streams, events and graphs stay torch's own. An operation is called again with tensors of the CPU that lie
// on the same memory; what it returns is copied into memory of torch's CUDA allocator. While a graph is captured nothing
// is carried out: operation and arguments are kept, and a replay calls them again on the same addresses.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Logging.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
using MaybeTensor = std::optional<Tensor>;
using Guard = at::AutoDispatchBelowADInplaceOrView;

extern "C" int stand_in_captured_graph() __attribute__((weak));
extern "C" void stand_in_set_graphs(void (*)(int), long (*)(int)) __attribute__((weak));

namespace {

struct Recorded {
  OperatorHandle operation;
  Stack arguments;
  std::vector<Tensor> results;  // tensors of the CPU on the device's memory
};

std::unordered_map<int, std::vector<Recorded>> graphs;

int captured_graph() { return stand_in_captured_graph ? stand_in_captured_graph() : 0; }

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// The same elements as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  const int64_t bytes = tensor.storage().nbytes(), size = tensor.element_size();
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  if (!bytes) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto all = at::from_blob(const_cast<void*>(tensor.storage().data()), {bytes / size}, options);
  auto out = all.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) out = out.conj();
  if (tensor.is_neg()) out = out._neg_view();
  return out;
}

MaybeTensor on_host(const MaybeTensor& tensor) {
  if (!tensor || !tensor->defined()) return {};
  return on_host(*tensor);
}

// A result of the CPU in the memory of torch's CUDA allocator.
Tensor on_device(const Tensor& result, c10::Device device) {
  if (!result.defined()) return result;
  auto made = at::empty_strided(result.sizes(), result.strides(), result.options().device(device));
  if (result.numel()) on_host(made).copy_(result);
  return made;
}

void append_tensors(const IValue& value, std::vector<Tensor>& out) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) out.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& one : value.toTensorList()) {
      if (one.defined()) out.push_back(one);
    }
  } else if (value.isList()) {
    for (const IValue& one : value.toListRef()) append_tensors(one, out);
  }
}

// Device tensors of one call and their counterparts on the host.
struct Swap {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // (device, host)
  c10::Device device{at::kCUDA, 0};

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    device = tensor.device();
    for (auto& [ours, host] : pairs) {
      if (ours.is_same(tensor)) return host;
    }
    pairs.emplace_back(tensor, on_host(tensor));
    return pairs.back().second;
  }

  IValue to_host(const IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& one : value.toTensorList()) list.push_back(to_host(one));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<MaybeTensor> list;
      for (const IValue& one : value.toListRef()) {
        list.push_back(one.isNone() ? MaybeTensor() : MaybeTensor(to_host(one.toTensor())));
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice().has_index() ? value.toDevice() : c10::Device(at::kCUDA, 0);
      return c10::Device(at::kCPU);
    }
    return value;
  }

  Tensor to_device(const Tensor& result) {
    if (!result.defined() || result.is_cuda()) return result;
    for (auto& [ours, host] : pairs) {
      if (host.is_same(result)) return ours;
    }
    for (auto& [ours, host] : pairs) {  // a view of an argument stays one
      const bool shares = result.has_storage() && result.storage().data() && ours.storage().nbytes() &&
                          result.storage().data() == ours.storage().data();
      if (shares) return ours.as_strided(result.sizes(), result.strides(), result.storage_offset());
    }
    return on_device(result, device);
  }

  // What `out=` made larger on the host.
  void resize_arguments() {
    for (auto& [ours, host] : pairs) {
      if (ours.sizes() != host.sizes()) {
        ours.resize_(host.sizes());
        if (host.numel()) on_host(ours).copy_(host);
      } else if (!ours.storage().nbytes() && host.storage().nbytes()) {
        on_host(ours).copy_(host);
      }
    }
  }
};

// A generator of the CPU for one call, from the CUDA generator's seed and offset, which moves on.
at::Generator generator_for(c10::Device device, const std::optional<at::Generator>& given) {
  auto own = given && given->defined() ? *given : at::globalContext().defaultGenerator(device);
  if (own.device().is_cpu()) return own;
  std::lock_guard<std::mutex> lock(own.mutex());
  const auto offset = own.get_offset();
  const auto seed = own.current_seed() * 0x9E3779B97F4A7C15ull + offset + 1;
  if (!captured_graph()) own.set_offset(offset + 4);
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

bool takes_generator(const c10::Argument& argument) {
  const auto& type = argument.type();
  if (type->kind() == c10::TypeKind::GeneratorType) return true;
  if (type->kind() != c10::TypeKind::OptionalType) return false;
  return type->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::GeneratorType;
}

void check_capture(const c10::OperatorName& name) {
  const bool waits = name.name == "aten::_local_scalar_dense" || name.name == "aten::nonzero";
  TORCH_CHECK(!waits, "CUDA error: operation not permitted when stream is capturing (", full_name(name), ")");
}

// Operations whose arguments may lie on several devices.
const std::unordered_set<std::string> mixing = {
    "aten::copy_", "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_index_put_impl",
    "aten::index_put", "aten::_foreach_copy_", "aten::_fused_adam_", "aten::_fused_adamw_"};

void check_devices(const c10::OperatorName& name, const Stack& stack, size_t start) {
  if (mixing.count(name.name)) return;
  const bool lists_may_mix = name.name.find("_foreach_") != std::string::npos || !name.name.find("aten::_fused_");
  std::vector<Tensor> all;
  for (size_t i = start; i < stack.size(); i++) append_tensors(stack[i], all);
  const auto first = std::find_if(all.begin(), all.end(), [](const Tensor& one) { return one.is_cuda(); });
  if (first == all.end()) return;
  const auto device = first->device();
  for (auto& one : all) {
    const bool same = one.is_cuda() ? lists_may_mix || one.device() == device : one.dim() == 0;
    TORCH_CHECK(same, "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
                one.device(), "! (", full_name(name), ")");
  }
}

// CUDA's softmax turns half precision into fp32 on its way; the CPU's does not.
void widen_softmax(const c10::OperatorName& name, Stack& stack, size_t start, Swap& swap) {
  if (name.name != "aten::_softmax" && name.name != "aten::_log_softmax") return;
  auto& half_to_float = stack[start + 2];
  if (!half_to_float.isBool() || !half_to_float.toBool()) return;
  const auto input = stack[start].toTensor();
  swap.device = input.device();
  stack[start] = on_host(input).to(at::kFloat);
  half_to_float = false;
}

void run(const OperatorHandle& operation, Stack* stack) {
  Guard guard;
  const auto& schema = operation.schema();
  const auto& name = schema.operator_name();
  const auto count = schema.arguments().size();
  const auto start = stack->size() - count;
  const int graph = captured_graph();
  if (graph) check_capture(name);
  check_devices(name, *stack, start);

  Swap swap;
  widen_softmax(name, *stack, start, swap);
  std::vector<Tensor> written, before;
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[start + i];
    value = swap.to_host(value);
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite()) append_tensors(value, written);
  }
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[start + i];
    if (!takes_generator(schema.arguments()[i])) continue;
    value = generator_for(swap.device, value.isNone() ? std::optional<at::Generator>() : value.toGenerator());
  }
  Stack kept;
  if (graph) {
    for (auto& one : written) before.push_back(one.clone());
    kept.assign(stack->begin() + start, stack->end());
  }

  operation.callBoxed(stack);

  swap.resize_arguments();
  const auto first = stack->size() - schema.returns().size();
  std::vector<Tensor> results;
  for (size_t i = first; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = swap.to_device(value.toTensor());
      if (value.toTensor().defined()) results.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& one : value.toTensorList()) {
        results.push_back(swap.to_device(one));
        list.push_back(results.back());
      }
      value = list;
    }
  }
  if (!graph) return;
  for (size_t i = 0; i < written.size(); i++) {  // a capture changes nothing
    if (written[i].sizes() == before[i].sizes()) written[i].copy_(before[i]);
  }
  Recorded recorded{operation, kept, {}};
  for (auto& one : results) recorded.results.push_back(one.is_cuda() ? on_host(one) : one);
  graphs[graph].push_back(std::move(recorded));
}

void replay(int graph) {
  Guard guard;
  for (auto& recorded : graphs[graph]) {
    Stack stack = recorded.arguments;
    recorded.operation.callBoxed(&stack);
    std::vector<Tensor> made;
    for (auto& value : stack) append_tensors(value, made);
    for (size_t i = 0; i < made.size() && i < recorded.results.size(); i++) {
      auto& result = recorded.results[i];
      if (made[i].numel() && made[i].data_ptr() != result.data_ptr()) result.copy_(made[i]);
    }
  }
}

long nodes_of(int graph) { return static_cast<long>(graphs[graph].size()); }

// Operations that the CPU lacks, or does otherwise

Tensor& copy_(Tensor& to, const Tensor& from, bool) {
  Guard guard;
  const auto target = to.is_cuda() ? on_host(to) : to, source = from.is_cuda() ? on_host(from) : from;
  const int graph = captured_graph();
  if (!graph) {
    target.copy_(source);
    return to;
  }
  TORCH_CHECK(to.is_cuda() && (from.is_cuda() || from.is_pinned()),
              "CUDA error: operation not permitted when stream is capturing (copy from pageable memory)");
  static const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  graphs[graph].push_back(Recorded{operation, Stack{target, source, false}, {target}});
  return to;
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool>) {
  Guard guard;
  const auto host = on_host(input);
  const auto generator = generator_for(input.device(), {});
  auto keep = at::empty(host.sizes(), host.options().dtype(at::kBool));
  keep.bernoulli_(1 - p, generator);
  const auto value = p >= 1 ? at::zeros_like(host) : host * keep / (1 - p);
  auto out = at::empty_like(input), mask = at::empty(input.sizes(), input.options().dtype(at::kBool));
  on_host(out).copy_(value);
  on_host(mask).copy_(keep);
  return {out, mask};
}

int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, double, bool,
                        std::optional<double>, bool) {
  return 0;
}

Tensor cudnn_convolution(const Tensor& input, const Tensor& weight, at::IntArrayRef padding, at::IntArrayRef stride,
                         at::IntArrayRef dilation, int64_t groups, bool, bool, bool) {
  Guard guard;
  const std::vector<int64_t> none(padding.size(), 0);
  const auto made =
      at::convolution(on_host(input), on_host(weight), {}, stride, padding, dilation, false, none, groups);
  return on_device(made, input.device());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cudnn_batch_norm(const Tensor& input, const Tensor& weight,
                                                            const MaybeTensor& bias, const MaybeTensor& mean,
                                                            const MaybeTensor& variance, bool training,
                                                            double momentum, double epsilon) {
  Guard guard;
  const auto [out, saved_mean, saved_deviation] =
      at::native_batch_norm(on_host(input), on_host(weight), on_host(bias), on_host(mean), on_host(variance), training,
                            momentum, epsilon);
  const auto device = input.device();
  return {on_device(out, device), on_device(saved_mean, device), on_device(saved_deviation, device),
          at::empty({0}, input.options().dtype(at::kByte))};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_batch_norm_backward(
    const Tensor& input, const Tensor& gradient, const Tensor& weight, const MaybeTensor& mean,
    const MaybeTensor& variance, const MaybeTensor& saved_mean, const MaybeTensor& saved_deviation, double epsilon,
    const Tensor&) {
  Guard guard;
  const auto [of_input, of_weight, of_bias] = at::native_batch_norm_backward(
      on_host(gradient), on_host(input), on_host(weight), on_host(mean), on_host(variance), on_host(saved_mean),
      on_host(saved_deviation), true, epsilon, {true, true, true});
  const auto device = input.device();
  return {on_device(of_input, device), on_device(of_weight, device), on_device(of_bias, device)};
}

// Those that only make tensors or views: torch's own code for CUDA does them without a kernel.
const std::unordered_set<std::string> left_alone = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::as_strided", "aten::view", "aten::_reshape_alias",
    "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor",
    "aten::resize_", "aten::is_set_to", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::unfold",
    "aten::view.dtype", "aten::_cudnn_init_dropout_state", "aten::_efficientzerotensor",
    "aten::_nested_tensor_storage_offsets"};

const std::unordered_set<std::string> own = {
    "aten::copy_", "aten::native_dropout", "aten::_fused_sdp_choice", "aten::cudnn_convolution",
    "aten::cudnn_batch_norm", "aten::cudnn_batch_norm_backward"};

struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

int install() {
  Quiet quiet;  // torch warns of each registration that is replaced
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    const auto full = full_name(name);
    if (full.rfind("aten::", 0) || left_alone.count(full) || own.count(full)) continue;
    library.impl(full.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&run>());
  }
  library.impl("copy_", &copy_);
  library.impl("native_dropout", &native_dropout);
  library.impl("_fused_sdp_choice", &plain_attention);
  library.impl("cudnn_convolution", &cudnn_convolution);
  library.impl("cudnn_batch_norm", &cudnn_batch_norm);
  library.impl("cudnn_batch_norm_backward", &cudnn_batch_norm_backward);
  if (stand_in_set_graphs) stand_in_set_graphs(&replay, &nodes_of);
  return 0;
}

const int installed = install();

}  // namespace
