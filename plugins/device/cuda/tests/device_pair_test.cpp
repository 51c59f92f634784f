// The helpers of device_pair.h.
#include "tests/device_pair.h"

#include "plugin/plugin_host.h"
#include "quern/error.h"
#include "runtime/cuda_device.h"

namespace quern::cuda {

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
  if (!support.refusal.empty() || !open) return;
  for (const std::string& fault : op.faults(*cpu, *gpu)) CHECK(fault == "");
}

}  // namespace quern::cuda
