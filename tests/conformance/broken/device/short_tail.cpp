// Fault: swiglu works in packs of eight elements and leaves the rest as it was.
#include <cstring>

#include "cpu_with.h"

QUERN_PLUGIN("device", "short_tail", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Device>("short_tail", "does not write all of an output", {}, [](const quern::OptionValues&) {
    return std::make_unique<CpuWith>("short_tail", "swiglu", [](const quern::View& y) {
      const std::size_t tail = static_cast<std::size_t>(y.count() % 8) * quern::size_of(y.dtype);
      std::memset(y.as<char>() + y.bytes() - tail, 0xFF, tail);
    });
  });
}
