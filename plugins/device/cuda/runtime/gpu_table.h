#pragma once
// Rated figures of GPUs by name, so that plans, time estimates and speed-of-light figures need no hardware.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "quern/device.h"
#include "runtime/kernels.h"

namespace quern::cuda {

/// Dense peaks (no sparsity) in TFLOP/s, products summed in fp32; 0: the format is not supported by tensor cores.
struct GpuModel {
  std::string_view id;    ///< as the option `assume` spells it
  std::string_view name;  ///< as the driver's product name contains it
  int compute_capability;
  int multiprocessors;
  double memory_gib;                         ///< as the driver reports it
  double memory_rate, host_rate, peer_rate;  ///< bytes/s
  double f32, bf16, fp8, int8;
  std::size_t l2_mib, shared_kib;
};

const std::vector<GpuModel>& gpu_models();
/// The most specific model whose name is part of `product`, or null.
const GpuModel* gpu_named(std::string_view product);
/// "auto" and the ids of all models.
std::vector<std::string> assumable_gpus();

/// What a plan needs of a GPU.
struct GpuFacts {
  CudaTraits cuda;
  DeviceTraits device;
};
GpuFacts facts_of(const GpuModel& model);
/// Facts of the GPU `ordinal` in this machine; rates from the table, or estimated when it is not there. Throws a
/// resources error when it cannot be asked.
GpuFacts facts_of_unit(int ordinal);

}  // namespace quern::cuda
