#include <memory>

#include "options.h"
#include "quern/plugin.h"
#include "runtime/cpu_device.h"

static std::unique_ptr<quern::Device> make_cpu(const quern::OptionValues& values) {
  return std::make_unique<quern::cpu::CpuDevice>(quern::cpu::cpu_options().bind(values));
}

QUERN_PLUGIN("device", "cpu", manifest) {
  manifest.name = "cpu";
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Device>("cpu", "the host's cores; emulates every format, the reference for other devices",
                              quern::cpu::cpu_options().specs(), make_cpu);
}
