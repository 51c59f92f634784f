#pragma once
// Rated figures of GPUs by name, so that plans, time estimates and speed-of-light figures need no hardware.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "quern/device.h"
#include "quern/options.h"
#include "runtime/kernels.h"

namespace quern::cuda {

/// What multiprocessors of one design do in a clock.
struct Architecture {
  int compute_capability;
  double f32, bf16, fp8, int8;  ///< FLOPs, dense, with fp32 accumulators; 0: tensor cores do not support the format
  std::size_t shared_kib;       ///< shared memory that one block may ask for
  bool geforce;  ///< as the driver's product names say; copies between two of these pass through the host
  /// Share of the peak that GEMMs and attention reach, beside the share on Hopper: higher where tensor cores, not
  /// power, are what limits them. From published steps: docs/performance/estimates.md.
  double reach;
};

struct GpuModel {
  std::string_view id;       ///< as the option `assume` spells it
  std::string_view product;  ///< the driver's whole product name, without "NVIDIA" and "GeForce"
  const Architecture* architecture;
  int multiprocessors;
  double f32, bf16, fp8, int8;          ///< peaks in TFLOP/s, as above
  double memory_gib;                    ///< as the driver reports it
  double memory_rate, host_rate, peer;  ///< GB/s
  std::size_t l2_mib;
};

const std::vector<GpuModel>& gpu_models();
/// The model of a GPU with the driver's product name, so many multiprocessors and so much memory: cards of one name
/// differ in these. Null: the table does not have it.
const GpuModel* gpu_model(std::string_view product, int multiprocessors, double memory_gib);
/// "auto" and the ids of all models.
std::vector<std::string> assumable_gpus();
/// Product names of each id, as the driver writes them, and without the maker's name.
std::vector<Spelling> gpu_products();

/// What a plan needs of a GPU.
struct GpuFacts {
  CudaTraits cuda;
  DeviceTraits device;
  double reach = 1;  ///< as Architecture has it
};
GpuFacts facts_of(const GpuModel& model);
/// A GPU's properties by its driver.
struct GpuProperties {
  std::string name;
  int compute_capability, multiprocessors;
  double memory_gib;
  double clock_rate, memory_rate;  ///< Hz, bytes/s
};
/// Of a GPU that the table does not have, from its own properties: never figures of another model.
void estimate_rates(const GpuProperties& gpu, GpuFacts& facts);
/// Facts of the GPU `ordinal` in this machine; rates from the table, or estimated when it is not there. Throws a
/// resources error when it cannot be asked.
GpuFacts facts_of_unit(int ordinal);

}  // namespace quern::cuda
