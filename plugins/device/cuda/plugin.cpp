#include <memory>

#include "options.h"
#include "quern/plugin.h"
#include "runtime/cuda_device.h"

static std::unique_ptr<quern::Device> make_cuda(const quern::OptionValues& values) {
  return std::make_unique<quern::cuda::CudaDevice>(quern::cuda::cuda_options().bind(values));
}

QUERN_PLUGIN("device", "cuda", manifest) {
  manifest.name = "cuda";
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Device>("cuda", "an NVIDIA GPU: cuBLASLt, cuDNN and own kernels, captured into graphs",
                              quern::cuda::cuda_options().specs(), make_cuda);
}
