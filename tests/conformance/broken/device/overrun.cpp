// Fault: add works in packs of four elements and writes the last one whole.
#include <cstring>

#include "cpu_with.h"

QUERN_PLUGIN("device", "overrun", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Device>("overrun", "writes behind an output", {}, [](const quern::OptionValues&) {
    return std::make_unique<CpuWith>("overrun", "add", [](const quern::View& y) {
      const std::size_t over = static_cast<std::size_t>(-y.count() & 3) * quern::size_of(y.dtype);
      std::memset(y.as<char>() + y.bytes(), 0, over);
    });
  });
}
