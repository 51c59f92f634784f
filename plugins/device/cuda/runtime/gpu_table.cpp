#include "runtime/gpu_table.h"

#include <algorithm>

#include "runtime/check.h"

namespace quern::cuda {

namespace {

// The context, and the code and scratch of libraries: a process on an H100 took 12,475 MiB at its highest, of which
// 11.5 GiB were the arena.
constexpr std::size_t kOwnBytes = std::size_t{700} << 20;
// Kept free besides, for what a display takes and for what is lost between allocations.
constexpr double kReservedGib = 0.3;
// Of the link's rate, each way while both are busy: 44 of 55 GB/s on an H100 80GB HBM3.
constexpr double kDuplexShare = 0.8;

// Makers' data sheets; links between GPUs at 0.85 of a direction of NVLink, of PCIe, or half of it where copies pass
// through the host. GeForce cards sum fp8 and bf16 products in fp32 at half their headline rate.
const std::vector<GpuModel> kModels = {
    // id, name, capability, SMs, GiB, memory, host, peer, f32, bf16, fp8, int8, L2, shared
    {"H100", "H100 80GB HBM3", 90, 132, 79.2, 3.35e12, 55e9, 380e9, 66.9, 989.4, 1978.9, 1978.9, 50, 227},
    {"H100-PCIe", "H100 PCIe", 90, 114, 79.2, 2.04e12, 55e9, 50e9, 51.2, 756.4, 1512.9, 1512.9, 50, 227},
    {"H100-NVL", "H100 NVL", 90, 132, 93.1, 3.94e12, 55e9, 250e9, 60.0, 835.5, 1671.0, 1671.0, 50, 227},
    {"GH200", "GH200", 90, 132, 94.5, 4.0e12, 380e9, 50e9, 66.9, 989.4, 1978.9, 1978.9, 50, 227},
    {"H200", "H200", 90, 132, 139.8, 4.8e12, 55e9, 380e9, 66.9, 989.4, 1978.9, 1978.9, 50, 227},
    {"B200", "B200", 100, 148, 178.4, 7.7e12, 55e9, 750e9, 75.0, 2250.0, 4500.0, 4500.0, 126, 227},
    {"A100-40GB", "A100-SXM4-40GB", 80, 108, 39.4, 1.555e12, 25e9, 250e9, 19.5, 311.9, 0, 623.7, 40, 163},
    {"A100", "NVIDIA A100", 80, 108, 79.2, 2.039e12, 25e9, 250e9, 19.5, 311.9, 0, 623.7, 40, 163},
    {"L4", "NVIDIA L4", 89, 58, 22.0, 300e9, 25e9, 20e9, 30.3, 121.0, 242.5, 242.5, 48, 99},
    {"L40S", "NVIDIA L40S", 89, 142, 44.4, 864e9, 25e9, 20e9, 91.6, 362.1, 733.0, 733.0, 96, 99},
    {"A10", "NVIDIA A10", 86, 72, 22.0, 600e9, 25e9, 20e9, 31.2, 125.0, 0, 250.0, 6, 99},
    {"RTX-A6000", "RTX A6000", 86, 84, 47.4, 768e9, 25e9, 20e9, 38.7, 154.8, 0, 309.7, 6, 99},
    {"RTX-6000-Ada", "RTX 6000 Ada", 89, 142, 47.4, 960e9, 25e9, 20e9, 91.1, 364.2, 728.5, 728.5, 96, 99},
    {"RTX-3060", "RTX 3060", 86, 28, 11.6, 360e9, 25e9, 12e9, 12.7, 25.5, 0, 101.9, 3, 99},
    {"RTX-3090", "RTX 3090", 86, 82, 23.6, 936e9, 25e9, 12e9, 35.6, 71.0, 0, 284.0, 6, 99},
    {"RTX-4060-Ti-16GB", "RTX 4060 Ti", 89, 34, 15.5, 288e9, 12e9, 6e9, 22.1, 44.1, 88.2, 176.5, 32, 99},
    {"RTX-4070-Ti-Super", "RTX 4070 Ti SUPER", 89, 66, 15.5, 672e9, 25e9, 12e9, 44.1, 88.2, 176.4, 352.8, 48, 99},
    {"RTX-4080", "RTX 4080", 89, 76, 15.5, 717e9, 25e9, 12e9, 48.7, 97.5, 194.9, 389.9, 64, 99},
    {"RTX-4090", "RTX 4090", 89, 128, 23.5, 1.008e12, 25e9, 12e9, 82.6, 165.2, 330.3, 660.6, 72, 99},
    {"RTX-5060-Ti", "RTX 5060 Ti", 120, 36, 15.5, 448e9, 25e9, 12e9, 23.7, 47.4, 94.9, 189.7, 32, 99},
    {"RTX-5070-Ti", "RTX 5070 Ti", 120, 70, 15.5, 896e9, 50e9, 25e9, 43.9, 87.9, 175.8, 351.5, 48, 99},
    {"RTX-5080", "RTX 5080", 120, 84, 15.5, 960e9, 50e9, 25e9, 56.3, 112.6, 225.1, 450.2, 64, 99},
    {"RTX-5090", "RTX 5090", 120, 170, 31.4, 1.792e12, 50e9, 25e9, 104.8, 209.5, 419.0, 838.0, 96, 99},
};

void set_memory(DeviceTraits& device, double gib) {
  const auto bytes = static_cast<std::size_t>((gib - kReservedGib) * 1024.0) << 20;
  device.own_bytes = kOwnBytes;
  device.memory_bytes = std::max(bytes, 2 * kOwnBytes) - kOwnBytes;
}

std::vector<std::pair<DType, double>> rates(double f32, double bf16, double fp8, double int8) {
  std::vector<std::pair<DType, double>> rates = {{DType::f32, f32 * 1e12}, {DType::bf16, bf16 * 1e12}};
  if (fp8 > 0) {
    rates.emplace_back(DType::e4m3, fp8 * 1e12);
    rates.emplace_back(DType::e5m2, fp8 * 1e12);
  }
  if (int8 > 0) rates.emplace_back(DType::i8, int8 * 1e12);
  return rates;
}

int attribute(cudaDeviceAttr which, int ordinal) {
  int value = 0;
  QUERN_CUDA(cudaDeviceGetAttribute(&value, which, ordinal));
  return value;
}

/// For a GPU that the table does not have: operations a clock and multiprocessor of its architecture.
void estimate_rates(int ordinal, GpuFacts& facts) {
  double clock = 1e3 * attribute(cudaDevAttrClockRate, ordinal) * facts.cuda.multiprocessors;
  int capability = facts.cuda.compute_capability;
  double bf16 = capability == 80 ? 2048 : capability == 90 ? 4096 : capability >= 100 && capability < 120 ? 8192 : 512;
  double f32 = capability == 80 ? 128 : 256;
  facts.device.matmul_rates = rates(f32 * clock / 1e12, bf16 * clock / 1e12,
                                    capability >= 89 ? 2 * bf16 * clock / 1e12 : 0, 2 * bf16 * clock / 1e12);
  facts.device.memory_rate = 2.0 * 1e3 * attribute(cudaDevAttrMemoryClockRate, ordinal) *
                             attribute(cudaDevAttrGlobalMemoryBusWidth, ordinal) / 8;
  facts.device.host_rate = 25e9;
  facts.device.duplex_rate = kDuplexShare * facts.device.host_rate;
  facts.device.peer_rate = 12e9;
}

}  // namespace

const std::vector<GpuModel>& gpu_models() { return kModels; }

const GpuModel* gpu_named(std::string_view product) {
  const GpuModel* best = nullptr;
  for (const GpuModel& model : kModels) {
    bool part = product.find(model.name) != std::string_view::npos;
    if (part && (best == nullptr || model.name.size() > best->name.size())) best = &model;
  }
  return best;
}

std::vector<std::string> assumable_gpus() {
  std::vector<std::string> ids = {"auto"};
  for (const GpuModel& model : kModels) ids.emplace_back(model.id);
  return ids;
}

GpuFacts facts_of(const GpuModel& model) {
  GpuFacts facts;
  facts.cuda.compute_capability = model.compute_capability;
  facts.cuda.multiprocessors = model.multiprocessors;
  facts.cuda.l2_bytes = model.l2_mib << 20;
  facts.cuda.shared_bytes = model.shared_kib << 10;
  facts.device.id = "cuda";
  facts.device.name = "NVIDIA " + std::string(model.id) + " (assumed)";
  set_memory(facts.device, model.memory_gib);
  facts.device.memory_rate = model.memory_rate;
  facts.device.host_rate = model.host_rate;
  facts.device.duplex_rate = kDuplexShare * model.host_rate;
  facts.device.peer_rate = model.peer_rate;
  facts.device.matmul_rates = rates(model.f32, model.bf16, model.fp8, model.int8);
  facts.device.can_capture = true;
  return facts;
}

GpuFacts facts_of_unit(int ordinal) {
  cudaDeviceProp properties;
  QUERN_CUDA(cudaGetDeviceProperties(&properties, ordinal));
  GpuFacts facts;
  const GpuModel* model = gpu_named(properties.name);
  if (model != nullptr) facts = facts_of(*model);
  facts.cuda.compute_capability = 10 * properties.major + properties.minor;
  facts.cuda.multiprocessors = properties.multiProcessorCount;
  facts.cuda.l2_bytes = static_cast<std::size_t>(properties.l2CacheSize);
  facts.cuda.shared_bytes = properties.sharedMemPerBlockOptin;
  facts.device.id = "cuda";
  facts.device.name = properties.name;
  facts.device.unit = "GPU-";
  for (const char byte : properties.uuid.bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    facts.device.unit += {kDigits[byte >> 4 & 15], kDigits[byte & 15]};
  }
  set_memory(facts.device, static_cast<double>(properties.totalGlobalMem) / (1u << 30));
  facts.device.can_capture = true;
  if (model == nullptr) estimate_rates(ordinal, facts);
  return facts;
}

}  // namespace quern::cuda
