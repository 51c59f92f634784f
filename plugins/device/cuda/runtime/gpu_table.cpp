#include "runtime/gpu_table.h"

#include <algorithm>
#include <cmath>

#include "runtime/check.h"

namespace quern::cuda {

namespace {

// The context, and the code and scratch of libraries: a process on an H100 took 12,475 MiB at its highest, of which
// 11.5 GiB were the arena.
constexpr std::size_t kOwnBytes = std::size_t{700} << 20;
// Kept free besides, for a display and for fragmentation between allocations.
constexpr double kReservedGib = 0.3;
// Of the link's rate, each way while both are busy: 44 of 55 GB/s on an H100 80GB HBM3.
constexpr double kDuplexShare = 0.8;

// GeForce cards, and some others, accumulate bf16 and fp8 in fp32 at half the rate of the same chip elsewhere.
// There power does not limit tensor cores, and clocks go beyond the rated boost.
constexpr double kFull = 1, kPro = 1.13, kHalf = 1.48, kHalfBlackwell = 1.55;
constexpr Architecture kA100{80, 128, 2048, 0, 4096, 163, false, kFull};
constexpr Architecture kAmpere{86, 256, 1024, 0, 2048, 99, false, kFull};
constexpr Architecture kAmpereHalf{86, 256, 512, 0, 1024, 99, false, kHalf};
constexpr Architecture kAmpereGeForce{86, 256, 512, 0, 2048, 99, true, kHalf};
constexpr Architecture kAda{89, 256, 1024, 2048, 2048, 99, false, kFull};
constexpr Architecture kAdaHalf{89, 256, 512, 1024, 1024, 99, false, kHalf};
constexpr Architecture kAdaGeForce{89, 256, 512, 1024, 2048, 99, true, kHalf};
constexpr Architecture kHopper{90, 256, 4096, 8192, 8192, 227, false, kFull};
constexpr Architecture kBlackwell{100, 256, 8192, 16384, 16384, 227, false, kFull};
constexpr Architecture kBlackwellUltra{103, 256, 8192, 16384, 512, 227, false, kFull};
constexpr Architecture kBlackwellPro{120, 256, 1024, 2048, 2048, 99, false, kPro};
constexpr Architecture kBlackwellGeForce{120, 256, 512, 1024, 2048, 99, true, kHalfBlackwell};

/// Rates in GB/s: of the memory, of the link to the host, and of a direction between two GPUs.
struct Rates {
  double memory, host, peer;
};

constexpr double kPcie4x8 = 12, kPcie4 = 25, kPcie5x8 = 25, kPcie5 = 50, kHopperPcie5 = 55;
/// Between GPUs 0.85 of a direction of NVLink, 0.8 of PCIe, or half of it where copies pass through the host.
constexpr Rates over_pcie(double memory, double host) { return {memory, host, 0.8 * host}; }
constexpr Rates through_host(double memory, double host) { return {memory, host, 0.5 * host}; }

/// Peaks of its multiprocessors at this boost clock, as on the data sheet.
GpuModel at_clock(std::string_view id, std::string_view product, const Architecture& chip, int multiprocessors,
                  double ghz, double memory_gib, Rates rates, std::size_t l2_mib) {
  const double peak = 1e-3 * ghz * multiprocessors;
  return {id,
          product,
          &chip,
          multiprocessors,
          peak * chip.f32,
          peak * chip.bf16,
          peak * chip.fp8,
          peak * chip.int8,
          memory_gib,
          rates.memory,
          rates.host,
          rates.peer,
          l2_mib};
}

/// Peaks of the data sheet: tensor cores have a boost clock of their own, or less than the architecture's rate.
struct Peaks {
  double f32, bf16, fp8, int8;
};
GpuModel with_peaks(std::string_view id, std::string_view product, const Architecture& chip, int multiprocessors,
                    Peaks peaks, double memory_gib, Rates rates, std::size_t l2_mib) {
  return {id,         product,    &chip,        multiprocessors, peaks.f32,  peaks.bf16, peaks.fp8,
          peaks.int8, memory_gib, rates.memory, rates.host,      rates.peer, l2_mib};
}

GpuModel geforce(std::string_view id, std::string_view product, const Architecture& chip, int multiprocessors,
                 double ghz, double memory_gib, double memory_rate, double host_rate, std::size_t l2_mib) {
  return at_clock(id, product, chip, multiprocessors, ghz, memory_gib, through_host(memory_rate, host_rate), l2_mib);
}

GpuModel card(std::string_view id, std::string_view product, const Architecture& chip, int multiprocessors, double ghz,
              double memory_gib, double memory_rate, double host_rate, std::size_t l2_mib) {
  return at_clock(id, product, chip, multiprocessors, ghz, memory_gib, over_pcie(memory_rate, host_rate), l2_mib);
}

// Makers' data sheets. The first is what a plan without a GPU is for.
const std::vector<GpuModel>& table() {
  constexpr Peaks kH100Peaks{66.9, 989.4, 1978.9, 1978.9}, kH20Peaks{44, 148, 296, 296};
  constexpr double kNvlink3 = 250, kNvlink4 = 380, kNvlinkBridge = 250, kNvlink5 = 750, kGrace = 380, kGraceOfTwo = 190;
  static const std::vector<GpuModel> kModels = {
      // id, name, architecture, multiprocessors, peaks or GHz, GiB, rates, L2 MiB
      with_peaks("H100", "H100 80GB HBM3", kHopper, 132, kH100Peaks, 79.2, {3350, kHopperPcie5, kNvlink4}, 50),
      with_peaks("H100-PCIe", "H100 PCIe", kHopper, 114, {51.2, 756.4, 1512.9, 1512.9}, 79.2, {2040, kHopperPcie5, 50},
                 50),
      with_peaks("H100-NVL", "H100 NVL", kHopper, 132, {60, 835.5, 1671, 1671}, 93.1,
                 {3940, kHopperPcie5, kNvlinkBridge}, 50),
      with_peaks("GH200", "GH200 480GB", kHopper, 132, kH100Peaks, 94.5, {4000, kGrace, 50}, 50),
      with_peaks("GH200-144GB", "GH200 144G HBM3e", kHopper, 132, kH100Peaks, 142.5, {4900, kGrace, 50}, 50),
      with_peaks("H200", "H200", kHopper, 132, kH100Peaks, 139.8, {4800, kHopperPcie5, kNvlink4}, 50),
      with_peaks("H200-NVL", "H200 NVL", kHopper, 132, {60, 835.5, 1671, 1671}, 139.8,
                 {4800, kHopperPcie5, kNvlinkBridge}, 50),
      with_peaks("H20", "H20", kHopper, 78, kH20Peaks, 95.0, {4000, kHopperPcie5, kNvlink4}, 60),
      with_peaks("H20-141GB", "H20-3e", kHopper, 78, kH20Peaks, 139.8, {4800, kHopperPcie5, kNvlink4}, 60),
      with_peaks("B200", "B200", kBlackwell, 148, {75, 2250, 4500, 4500}, 178.4, {7700, kHopperPcie5, kNvlink5}, 126),
      with_peaks("GB200", "GB200", kBlackwell, 152, {80, 2500, 5000, 5000}, 184.3, {8000, kGraceOfTwo, kNvlink5}, 126),
      with_peaks("B300", "B300 SXM6 AC", kBlackwellUltra, 148, {75, 2250, 4500, 150}, 268.0,
                 {8000, kHopperPcie5, kNvlink5}, 126),
      with_peaks("GB300", "GB300", kBlackwellUltra, 152, {80, 2500, 5000, 165}, 277.0, {8000, kGraceOfTwo, kNvlink5},
                 126),

      at_clock("A100", "A100-SXM4-80GB", kA100, 108, 1.41, 79.2, {2039, kPcie4, kNvlink3}, 40),
      at_clock("A100-40GB", "A100-SXM4-40GB", kA100, 108, 1.41, 39.4, {1555, kPcie4, kNvlink3}, 40),
      card("A100-PCIe", "A100 80GB PCIe", kA100, 108, 1.41, 79.2, 1935, kPcie4, 40),
      card("A100-PCIe-40GB", "A100-PCIE-40GB", kA100, 108, 1.41, 39.4, 1555, kPcie4, 40),
      card("A30", "A30", kA100, 56, 1.44, 23.5, 933, kPcie4, 24),
      card("A2", "A2", kAmpere, 10, 1.77, 14.6, 200, kPcie4x8, 2),
      card("A10", "A10", kAmpere, 72, 1.695, 22.0, 600, kPcie4, 6),
      card("A10G", "A10G", kAmpereHalf, 80, 1.71, 22.0, 600, kPcie4, 6),
      card("A16", "A16", kAmpere, 10, 1.755, 14.6, 200, kPcie4, 2),
      card("A40", "A40", kAmpere, 84, 1.74, 44.4, 696, kPcie4, 6),
      card("L4", "L4", kAda, 58, 2.04, 22.0, 300, kPcie4, 48),
      card("L20", "L20", kAdaHalf, 92, 2.52, 44.4, 864, kPcie4, 96),
      card("L40", "L40", kAdaHalf, 142, 2.49, 44.4, 864, kPcie4, 96),
      with_peaks("L40S", "L40S", kAda, 142, {91.6, 362.1, 733, 733}, 44.4, over_pcie(864, kPcie4), 96),

      card("RTX-A4000", "RTX A4000", kAmpere, 48, 1.56, 15.6, 448, kPcie4, 4),
      card("RTX-A4500", "RTX A4500", kAmpere, 56, 1.65, 19.6, 640, kPcie4, 6),
      card("RTX-A5000", "RTX A5000", kAmpere, 64, 1.695, 23.5, 768, kPcie4, 6),
      card("RTX-A5500", "RTX A5500", kAmpere, 80, 1.665, 23.5, 768, kPcie4, 6),
      card("RTX-A6000", "RTX A6000", kAmpere, 84, 1.8, 47.4, 768, kPcie4, 6),
      card("RTX-4000-SFF-Ada", "RTX 4000 SFF Ada Generation", kAda, 48, 1.565, 19.6, 280, kPcie4x8, 48),
      card("RTX-4000-Ada", "RTX 4000 Ada Generation", kAda, 48, 2.175, 19.6, 360, kPcie4, 48),
      card("RTX-4500-Ada", "RTX 4500 Ada Generation", kAda, 60, 2.58, 23.5, 432, kPcie4, 48),
      card("RTX-5000-Ada", "RTX 5000 Ada Generation", kAda, 100, 2.55, 31.4, 576, kPcie4, 72),
      card("RTX-6000-Ada", "RTX 6000 Ada Generation", kAda, 142, 2.505, 47.4, 960, kPcie4, 96),
      card("RTX-PRO-6000", "RTX PRO 6000 Blackwell Workstation Edition", kBlackwellPro, 188, 2.617, 95.0, 1792, kPcie5,
           128),
      card("RTX-PRO-6000-Max-Q", "RTX PRO 6000 Blackwell Max-Q Workstation Edition", kBlackwellPro, 188, 2.288, 95.0,
           1792, kPcie5, 128),
      card("RTX-PRO-6000-Server", "RTX PRO 6000 Blackwell Server Edition", kBlackwellPro, 188, 2.493, 95.0, 1597,
           kPcie5, 128),

      geforce("RTX-3060", "RTX 3060", kAmpereGeForce, 28, 1.777, 11.6, 360, kPcie4, 3),
      geforce("RTX-3060-Ti", "RTX 3060 Ti", kAmpereGeForce, 38, 1.665, 7.6, 448, kPcie4, 4),
      geforce("RTX-3070", "RTX 3070", kAmpereGeForce, 46, 1.725, 7.6, 448, kPcie4, 4),
      geforce("RTX-3070-Ti", "RTX 3070 Ti", kAmpereGeForce, 48, 1.77, 7.6, 608, kPcie4, 4),
      geforce("RTX-3080", "RTX 3080", kAmpereGeForce, 68, 1.71, 9.6, 760, kPcie4, 5),
      geforce("RTX-3080-12GB", "RTX 3080", kAmpereGeForce, 70, 1.71, 11.6, 912, kPcie4, 6),
      geforce("RTX-3080-Ti", "RTX 3080 Ti", kAmpereGeForce, 80, 1.665, 11.6, 912, kPcie4, 6),
      geforce("RTX-3090", "RTX 3090", kAmpereGeForce, 82, 1.695, 23.6, 936, kPcie4, 6),
      geforce("RTX-3090-Ti", "RTX 3090 Ti", kAmpereGeForce, 84, 1.86, 23.6, 1008, kPcie4, 6),
      geforce("RTX-4060", "RTX 4060", kAdaGeForce, 24, 2.46, 7.6, 272, kPcie4x8, 24),
      geforce("RTX-4060-Ti-16GB", "RTX 4060 Ti", kAdaGeForce, 34, 2.535, 15.5, 288, kPcie4x8, 32),
      geforce("RTX-4060-Ti-8GB", "RTX 4060 Ti", kAdaGeForce, 34, 2.535, 7.6, 288, kPcie4x8, 32),
      geforce("RTX-4070", "RTX 4070", kAdaGeForce, 46, 2.475, 11.6, 504, kPcie4, 36),
      geforce("RTX-4070-Super", "RTX 4070 SUPER", kAdaGeForce, 56, 2.475, 11.6, 504, kPcie4, 48),
      geforce("RTX-4070-Ti", "RTX 4070 Ti", kAdaGeForce, 60, 2.61, 11.6, 504, kPcie4, 48),
      geforce("RTX-4070-Ti-Super", "RTX 4070 Ti SUPER", kAdaGeForce, 66, 2.61, 15.5, 672, kPcie4, 48),
      geforce("RTX-4080", "RTX 4080", kAdaGeForce, 76, 2.505, 15.5, 717, kPcie4, 64),
      geforce("RTX-4080-Super", "RTX 4080 SUPER", kAdaGeForce, 80, 2.55, 15.5, 736, kPcie4, 64),
      geforce("RTX-4090", "RTX 4090", kAdaGeForce, 128, 2.52, 23.5, 1008, kPcie4, 72),
      geforce("RTX-4090-D", "RTX 4090 D", kAdaGeForce, 114, 2.52, 23.5, 1008, kPcie4, 72),
      geforce("RTX-4060-Laptop", "RTX 4060 Laptop GPU", kAdaGeForce, 24, 2.37, 7.6, 256, kPcie4x8, 32),
      geforce("RTX-4070-Laptop", "RTX 4070 Laptop GPU", kAdaGeForce, 36, 2.175, 7.6, 256, kPcie4x8, 32),
      geforce("RTX-4080-Laptop", "RTX 4080 Laptop GPU", kAdaGeForce, 58, 2.28, 11.6, 432, kPcie4, 48),
      geforce("RTX-4090-Laptop", "RTX 4090 Laptop GPU", kAdaGeForce, 76, 2.04, 15.5, 576, kPcie4, 64),
      geforce("RTX-5060", "RTX 5060", kBlackwellGeForce, 30, 2.497, 7.6, 448, kPcie5x8, 24),
      geforce("RTX-5060-Ti-16GB", "RTX 5060 Ti", kBlackwellGeForce, 36, 2.572, 15.5, 448, kPcie5x8, 32),
      geforce("RTX-5060-Ti-8GB", "RTX 5060 Ti", kBlackwellGeForce, 36, 2.572, 7.6, 448, kPcie5x8, 32),
      geforce("RTX-5070", "RTX 5070", kBlackwellGeForce, 48, 2.512, 11.5, 672, kPcie5, 48),
      geforce("RTX-5070-Ti", "RTX 5070 Ti", kBlackwellGeForce, 70, 2.452, 15.5, 896, kPcie5, 48),
      geforce("RTX-5080", "RTX 5080", kBlackwellGeForce, 84, 2.617, 15.5, 960, kPcie5, 64),
      geforce("RTX-5090", "RTX 5090", kBlackwellGeForce, 170, 2.407, 31.4, 1792, kPcie5, 96),
      geforce("RTX-5080-Laptop", "RTX 5080 Laptop GPU", kBlackwellGeForce, 60, 2.287, 15.5, 896, kPcie5, 64),
      geforce("RTX-5090-Laptop", "RTX 5090 Laptop GPU", kBlackwellGeForce, 82, 2.16, 23.5, 896, kPcie5, 64),
  };
  return kModels;
}

/// Of a GPU that the table does not have; GeForce's rates, which are the lower ones, where that is open.
const Architecture& architecture_of(int compute_capability, bool geforce) {
  if (compute_capability >= 120) return geforce ? kBlackwellGeForce : kBlackwellPro;
  if (compute_capability >= 103) return kBlackwellUltra;
  if (compute_capability >= 100) return kBlackwell;
  if (compute_capability >= 90) return kHopper;
  if (compute_capability >= 89) return geforce ? kAdaGeForce : kAda;
  if (compute_capability > 80) return geforce ? kAmpereGeForce : kAmpere;
  return kA100;
}

void set_memory(DeviceTraits& device, double gib) {
  const auto bytes = static_cast<std::size_t>((gib - kReservedGib) * 1024.0) << 20;
  device.own_bytes = kOwnBytes;
  device.memory_bytes = std::max(bytes, 2 * kOwnBytes) - kOwnBytes;
}

void set_rates(DeviceTraits& device, const Peaks& peaks, const Rates& rates) {
  constexpr double kTera = 1e12, kGiga = 1e9;
  device.matmul_rates = {{DType::f32, peaks.f32 * kTera}, {DType::bf16, peaks.bf16 * kTera}};
  if (peaks.fp8 > 0)
    for (const DType format : {DType::e4m3, DType::e5m2}) device.matmul_rates.emplace_back(format, peaks.fp8 * kTera);
  if (peaks.int8 > 0) device.matmul_rates.emplace_back(DType::i8, peaks.int8 * kTera);
  device.memory_rate = rates.memory * kGiga;
  device.host_rate = rates.host * kGiga;
  device.duplex_rate = kDuplexShare * device.host_rate;
  device.peer_rate = rates.peer * kGiga;
}

int attribute(cudaDeviceAttr which, int ordinal) {
  int value = 0;
  QUERN_CUDA(cudaDeviceGetAttribute(&value, which, ordinal));
  return value;
}

constexpr std::string_view kMaker = "NVIDIA ", kGeForce = "GeForce ";

/// The driver's product name without these.
std::string_view without_brand(std::string_view product) {
  for (const std::string_view brand : {kMaker, kGeForce})
    if (product.starts_with(brand)) product.remove_prefix(brand.size());
  return product;
}

}  // namespace

const std::vector<GpuModel>& gpu_models() { return table(); }

const GpuModel* gpu_model(std::string_view product, int multiprocessors, double memory_gib) {
  const GpuModel* best = nullptr;
  auto beside = [&](const GpuModel& model) { return std::abs(model.memory_gib - memory_gib); };
  for (const GpuModel& model : gpu_models())
    if (model.product == without_brand(product) && model.multiprocessors == multiprocessors &&
        (best == nullptr || beside(model) < beside(*best)))
      best = &model;
  return best;
}

std::vector<std::string> assumable_gpus() {
  std::vector<std::string> ids = {"auto"};
  for (const GpuModel& model : gpu_models()) ids.emplace_back(model.id);
  return ids;
}

std::vector<Spelling> gpu_products() {
  std::vector<Spelling> products;
  for (const GpuModel& model : gpu_models()) {
    const std::string product(model.product), id(model.id);
    const std::string brand(model.architecture->geforce ? kGeForce : "");
    for (const std::string& name : {product, brand + product, std::string(kMaker) + brand + product})
      products.push_back({name, id});
  }
  return products;
}

GpuFacts facts_of(const GpuModel& model) {
  GpuFacts facts;
  facts.cuda.compute_capability = model.architecture->compute_capability;
  facts.cuda.multiprocessors = model.multiprocessors;
  facts.cuda.l2_bytes = model.l2_mib << 20;
  facts.cuda.shared_bytes = model.architecture->shared_kib << 10;
  facts.reach = model.architecture->reach;
  facts.device.id = "cuda";
  facts.device.name = "NVIDIA " + std::string(model.id) + " (assumed)";
  set_memory(facts.device, model.memory_gib);
  set_rates(facts.device, {model.f32, model.bf16, model.fp8, model.int8},
            {model.memory_rate, model.host_rate, model.peer});
  facts.device.can_capture = true;
  return facts;
}

void estimate_rates(const GpuProperties& gpu, GpuFacts& facts) {
  const bool geforce = gpu.name.find(kGeForce) != std::string::npos;
  const Architecture& chip = architecture_of(gpu.compute_capability, geforce);
  const double peak = 1e-12 * gpu.clock_rate * gpu.multiprocessors, memory = 1e-9 * gpu.memory_rate;
  set_rates(facts.device, {peak * chip.f32, peak * chip.bf16, peak * chip.fp8, peak * chip.int8},
            geforce ? through_host(memory, kPcie4) : over_pcie(memory, kPcie4));
  facts.reach = chip.reach;
}

GpuFacts facts_of_unit(int ordinal) {
  cudaDeviceProp properties;
  QUERN_CUDA(cudaGetDeviceProperties(&properties, ordinal));
  GpuProperties gpu{.name = properties.name,
                    .compute_capability = 10 * properties.major + properties.minor,
                    .multiprocessors = properties.multiProcessorCount,
                    .memory_gib = static_cast<double>(properties.totalGlobalMem) / (1u << 30),
                    .clock_rate = 1e3 * attribute(cudaDevAttrClockRate, ordinal),
                    .memory_rate = 2.0 * 1e3 * attribute(cudaDevAttrMemoryClockRate, ordinal) *
                                   attribute(cudaDevAttrGlobalMemoryBusWidth, ordinal) / 8};
  GpuFacts facts;
  if (const GpuModel* model = gpu_model(gpu.name, gpu.multiprocessors, gpu.memory_gib))
    facts = facts_of(*model);
  else
    estimate_rates(gpu, facts);
  facts.cuda.compute_capability = gpu.compute_capability;
  facts.cuda.multiprocessors = gpu.multiprocessors;
  facts.cuda.l2_bytes = static_cast<std::size_t>(properties.l2CacheSize);
  facts.cuda.shared_bytes = properties.sharedMemPerBlockOptin;
  facts.device.id = "cuda";
  facts.device.name = gpu.name;
  facts.device.unit = "GPU-";
  for (const char byte : properties.uuid.bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    facts.device.unit += {kDigits[byte >> 4 & 15], kDigits[byte & 15]};
  }
  set_memory(facts.device, gpu.memory_gib);
  facts.device.can_capture = true;
  return facts;
}

}  // namespace quern::cuda
