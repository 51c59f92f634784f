// The helpers of device_pair.h.
#include "tests/device_pair.h"

#include <cmath>
#include <cstdlib>
#include <random>

#include "plugin/plugin_host.h"
#include "quern/error.h"
#include "runtime/cuda_device.h"
#include "runtime/hopper_kernels.h"
#include "test_paths.h"

namespace quern::cuda {

namespace {

#ifdef QUERN_EMULATED
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

}  // namespace

bool affordable(std::int64_t elements, std::int64_t products) {
  const std::int64_t most = products > 0 ? 130000 : 5000;  // few ops are matmuls, and each takes some seconds
  if (!kEmulated || (elements <= most && products <= std::int64_t{1} << 28)) return true;
  MESSAGE("left to a GPU: " << elements << " elements, " << products << " multiplications");
  return false;
}

int draw(std::size_t count) {
  if (!kEmulated) return -1;
  const char* seed = std::getenv("QUERN_EMULATOR_SEED");
  static std::mt19937 random(seed ? static_cast<unsigned>(std::strtoul(seed, nullptr, 10)) : 1);
  return static_cast<int>(random() % count);
}

bool has_libraries() {
  if (kEmulated) MESSAGE("skipped: cuBLASLt and cuDNN are not emulated");
  return !kEmulated;
}

bool runs_hopper_kernels(const DevicePair& pair) {
  if (!pair.open) return false;
  const bool runs = has_hopper_kernels() && facts_of_unit(0).cuda.compute_capability == 90;
  if (!runs) MESSAGE("skipped: no Hopper GPU, or no code for sm_90a");
  return runs;
}

void on_fewer_multiprocessors(Device& gpu, const std::function<void()>& check) {
  auto& cuda = static_cast<CudaDevice&>(gpu);
  const int all = facts_of_unit(0).cuda.multiprocessors;
  for (const int fewer : {2, 14, 66}) {
    if (kEmulated && fewer > 2) break;
    CAPTURE(fewer);
    cuda.divide_among(fewer);
    check();
  }
  cuda.divide_among(all);
}

namespace {

std::int64_t elements(const std::vector<Operand>& operands) {
  std::int64_t sum = 0;
  for (const Operand& operand : operands) sum += operand.present ? element_count(operand.extents) : 0;
  return sum;
}

bool affordable_op(const OpInstance& op) {
  if (op.kind != "matmul") return affordable(elements(op.inputs) + elements(op.outputs), 0);
  auto count = [](const Operand& operand) { return static_cast<double>(element_count(operand.extents)); };
  return affordable(
      elements(op.outputs),
      static_cast<std::int64_t>(std::sqrt(count(op.inputs[0]) * count(op.inputs[1]) * count(op.outputs[0]))));
}

}  // namespace

DevicePair open_pair(CudaOptions options) {
  DevicePair pair;
  options.matmul_cache = false;
  pair.gpu = std::make_unique<CudaDevice>(options);
  try {
    pair.gpu->open(0);
    pair.open = true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::resources) throw;
    MESSAGE("skipped: " << std::string(error.what()));
  }
  static PluginHost host({std::filesystem::path(QUERN_BUILD_DIR) / "plugins"});  // never unloads what it loaded
  pair.cpu = host.create<Device>("cpu", default_values(host.require("device", "cpu").options));
  pair.cpu->open(0);
  return pair;
}

void DevicePair::run(const OpComparison& op) const {
  CAPTURE(op.label());
  OpSupport support = gpu->query(op.instance());
  if (support.refusal.find("compute capability") != std::string::npos) {
    MESSAGE("skipped: " << support.refusal);
    return;
  }
  CHECK(support.refusal == "");
  if (!support.refusal.empty() || !open || !affordable_op(op.instance())) return;
  try {
    for (const std::string& fault : op.faults(*cpu, *gpu)) CHECK(fault == "");
  } catch (const Error& error) {
    const bool lacks_library = std::string(error.what()).find("cuBLASLt has no algorithm") != std::string::npos;
    if (!kEmulated || !lacks_library) throw;
    MESSAGE("left to a GPU: " << op.label() << ", by cuBLASLt");
  }
}

}  // namespace quern::cuda
