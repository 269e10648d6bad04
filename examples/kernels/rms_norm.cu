// RMSNorm on a GPU: one block of threads for each row, sums are kept in fp32. The same operator as in rms_norm.cpp.

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace {

constexpr int THREADS = 256;

template <typename T>
__global__ void rms_norm_rows(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, int64_t width,
                              float eps) {
  __shared__ float partial[THREADS / 32];
  const T* in = x + blockIdx.x * width;
  T* out = y + blockIdx.x * width;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < width; i += THREADS) sum += float(in[i]) * float(in[i]);
  for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(0xffffffff, sum, half);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < THREADS / 32; ++warp) total += partial[warp];
  const float r = rsqrtf(total / width + eps);
  for (int64_t i = threadIdx.x; i < width; i += THREADS) out[i] = T(float(in[i]) * r * float(weight[i]));
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 1 && x.size(1) == weight.size(0),
              "rms_norm takes x[rows, width] and weight[width], not ", x.sizes(), " and ", weight.sizes());
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "x and weight have different dtypes");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor from = x.contiguous(), scale = weight.contiguous();
  at::Tensor y = at::empty_like(from);
  const int64_t rows = x.size(0), width = x.size(1);
  if (y.numel() == 0) return y;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "rms_norm", [&] {
    rms_norm_rows<scalar_t><<<rows, THREADS, 0, c10::cuda::getCurrentCUDAStream()>>>(
        from.const_data_ptr<scalar_t>(), scale.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(), width,
        float(eps));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(example_cuda_norm, m) { m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"); }

TORCH_LIBRARY_IMPL(example_cuda_norm, CUDA, m) { m.impl("rms_norm", &rms_norm); }
