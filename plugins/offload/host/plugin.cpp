// Pinned host memory: what is there comes to the device and goes back by its copy engines.
#include "quern/plugin.h"
#include "quern/options.h"

#include "shared/pinned_store/pinned_store.h"

namespace {

using namespace quern;

struct HostOptions {
  bool write_combined = false;
};

OptionTable<HostOptions> host_options() {
  OptionTable<HostOptions> table;
  table.add("write_combined", &HostOptions::write_combined,
            "uncached host memory, if caches slow transfers down; checkpoints read it slowly, and it has neither huge "
            "pages nor the device's NUMA node");
  return table;
}

}  // namespace

QUERN_PLUGIN("offload", "host", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<OffloadStore>(
      "host", "pinned host memory, reached by copy engines", host_options().specs(), [](const OptionValues& values) {
        const bool combined = host_options().bind(values).write_combined;
        return std::make_unique<PinnedStore>(OffloadTraits{.id = "host", .can_capture = true, .in_host_memory = true},
                                             combined ? MemoryKind::write_combined : MemoryKind::pinned);
      });
}
