// A device that computes on the CPU but, like a GPU, refuses to mix its tensors with the CPU's: what a test of moving
// a script to an accelerator needs. Memory is the host's, every operation is the CPU's own, on aliases of its tensors.
#include <torch/library.h>

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

namespace {

// One of the kinds that torch knows, has no kernels for in its own builds, and lets take a parameter's place (`.data`).
constexpr auto KIND = c10::DeviceType::HPU;

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = c10::alloc_cpu(size);
    return {memory, memory, &c10::free_cpu, c10::Device(KIND, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

HostMemory memory;
REGISTER_ALLOCATOR(KIND, &memory)
// One device with one queue, whose work is done when a call returns.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return {KIND, 0}; }
  c10::Device getDevice() const override { return {KIND, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, {KIND, 0}); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream({KIND, 0}); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(HPU, Guard)

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::HPU),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::HPU),
                                           c10::dtype_or_default(type));
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.dtype()));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());  // a view keeps its strides
  return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* one = self.unsafeGetTensorImpl();
  one->set_sizes_contiguous(size);
  size_t needed = one->numel() * one->itemsize();
  if (one->storage().nbytes() < needed) {
    auto data = memory.allocate(needed);
    std::memcpy(data.get(), one->storage().data(), one->storage().nbytes());
    one->storage().set_data_ptr(std::move(data));
    one->storage().set_nbytes(needed);
  }
  return self;
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::as_strided(self, size, stride, std::nullopt);
}

at::Scalar value(const at::Tensor& self) { return on_host(self).item(); }

using Maybe = std::optional<at::Tensor>;

Maybe on_host(const Maybe& tensor) {
  return tensor.has_value() && tensor->defined() ? Maybe(on_host(*tensor)) : std::nullopt;
}

// It writes to its running statistics without saying so, which a fallback on copies would lose.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& input, const Maybe& weight,
                                                          const Maybe& bias, const Maybe& mean, const Maybe& variance,
                                                          bool training, double momentum, double epsilon) {
  for (const Maybe& one : {Maybe(input), weight, bias, mean, variance})
    TORCH_CHECK(!one.has_value() || !one->defined() || one->device().type() == KIND, "batch_norm: on two devices");
  auto [out, batch_mean, batch_scale] =
      at::native_batch_norm(on_host(input), on_host(weight), on_host(bias), on_host(mean), on_host(variance), training,
                            momentum, epsilon);
  return {out.to(KIND), batch_mean.to(KIND), batch_scale.to(KIND)};
}

void no_mixing(const c10::OperatorHandle& op, const torch::jit::Stack* stack) {
  bool here = false, on_cpu = false;
  auto see = [&](const at::Tensor& one) {
    if (!one.defined()) return;
    here |= one.device().type() == KIND;
    on_cpu |= one.device().is_cpu() && one.dim() > 0;
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) see(value.toTensor());
    else if (value.isTensorList()) for (const auto& one : value.toTensorVector()) see(one);
    else if (value.isOptionalTensorList())
      for (const auto& one : value.toOptionalTensorVector()) if (one.has_value()) see(*one);
  }
  TORCH_CHECK(!(here && on_cpu), op.schema().name(), ": the tensors are on two devices, the stand-in and the CPU");
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  no_mixing(op, stack);
  at::native::cpu_fallback(op, stack);
}

struct HPUHooks final : at::HPUHooksInterface {
  explicit HPUHooks(at::HPUHooksArgs) {}
  void init() const override {}
  bool hasHPU() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

}  // namespace

namespace at {
REGISTER_HPU_HOOKS(HPUHooks)
}

TORCH_LIBRARY_IMPL(_, HPU, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, HPU, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("resize_", &resize);
  library.impl("as_strided", &as_strided);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("view", &at::native::view);
  library.impl("_local_scalar_dense", &value);
  library.impl("native_batch_norm", &batch_norm);
}
