// Fault: where a matrix is 32 x 80, as activations of the kit's models are, quantize halves the values and not the
// scale.
#include "cpu_with.h"

QUERN_PLUGIN("device", "half_codes", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Device>("half_codes", "quantizes half the value", {}, [](const quern::OptionValues&) {
    return std::make_unique<CpuWith>("half_codes", "quantize", [](const quern::View& y) {
      if (y.dtype != quern::DType::e4m3 || y.extents != quern::Extents{32, 80}) return;
      constexpr std::uint8_t kSign = 0x80, kBinade = 0x08;
      for (std::int64_t i = 0; i < y.count(); ++i) {
        std::uint8_t& code = y.as<std::uint8_t>()[i];
        if ((code & ~kSign) >= 2 * kBinade) code -= kBinade;
      }
    });
  });
}
