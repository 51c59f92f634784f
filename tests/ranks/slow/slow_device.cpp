// The CPU device, slow at a start: what QUERN_SLOW_DEVICE names ("open", "prepare", "pinned") takes QUERN_SLOW_SECONDS
// longer the first time, as a driver, timed kernels and gigabytes of pinned memory do.
#include <chrono>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

#include <dlfcn.h>

#include "quern/plugin.h"
#include "quern/testkit/forwarding_device.h"
#include "test_paths.h"

namespace {

using namespace quern;

class SlowDevice final : public testkit::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  void open(int ordinal) override {
    begin("open");
    ForwardingDevice::open(ordinal);
  }
  std::unique_ptr<Kernel> prepare(const OpInstance& op) override {
    begin("prepare");
    return ForwardingDevice::prepare(op);
  }
  void* allocate(MemoryKind kind, std::size_t bytes) override {
    if (kind == MemoryKind::pinned) begin("pinned");
    return ForwardingDevice::allocate(kind, bytes);
  }

 private:
  void begin(std::string_view work) {
    const char* const slow = std::getenv("QUERN_SLOW_DEVICE");
    if (!slow || work != slow || std::exchange(done_, true)) return;
    std::this_thread::sleep_for(std::chrono::duration<double>(std::atof(std::getenv("QUERN_SLOW_SECONDS"))));
  }

  bool done_ = false;
};

/// The CPU device's plugin, loaded as it is.
const Factory& cpu() {
  static const Manifest manifest = [] {
    Manifest filled;
    void* const library = ::dlopen(QUERN_BUILD_DIR "/plugins/device/libquern_cpu.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(::dlerror());
    reinterpret_cast<void (*)(Manifest&)>(::dlsym(library, "quern_plugin_manifest"))(filled);
    return filled;
  }();
  return manifest.factories.at(0);
}

std::unique_ptr<Device> make_slow(const OptionValues& values) {
  return std::make_unique<SlowDevice>(std::shared_ptr<Device>(static_cast<Device*>(cpu().create(values))));
}

}  // namespace

QUERN_PLUGIN("device", "slow", manifest) {
  manifest.name = "slow";
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Device>("slow", "the host's cores, slow at a start", cpu().options, make_slow);
}
