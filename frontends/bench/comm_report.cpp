#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "bench/comm.h"

namespace quern::bench {

std::string comm_table_head(const CommBenchResult& result, const DeviceTraits& device) {
  return fmt::format("{}, {} ranks of {}; link rated at {:.4g} GB/s\n\n{:<16}{:>12}{:>12}{:>12}{:>10}\n",
                     result.communicator, result.ranks, device.name, result.link_rate / 1e9, "collective", "bytes",
                     "time", "bus GB/s", "of link");
}

std::string comm_table_line(const CommBenchResult& result, const CollectiveTime& time) {
  const std::string share =
      result.link_rate > 0 ? fmt::format("{:>9.0f}%", 100 * time.bus_rate / result.link_rate) : std::string();
  return fmt::format("{:<16}{:>12}{:>12}{:>12.4g}{}\n", time.collective, format_bytes(time.bytes),
                     fmt::format("{:.1f} us", 1e6 * time.seconds), time.bus_rate / 1e9, share);
}

std::string comm_table_end(const ProductBeside& product) {
  const std::string clocks =
      product.at_equal_clocks > 0
          ? fmt::format("; at {:.0f} and {:.0f} MHz, {:+.1f}% in clock cycles", product.clock_alone,
                        product.clock_beside, 100 * (product.at_equal_clocks - 1))
          : std::string();
  return fmt::format("\na large bf16 GEMM: {:.0f} us alone, {:.0f} us during all_gathers, {:+.1f}%{}{}\n\n",
                     1e6 * product.alone, 1e6 * product.beside, 100 * (product.beside / product.alone - 1),
                     product.covered ? "" : " (they ended before it)", clocks);
}

std::string comm_bench_json(const CommBenchResult& result, const DeviceTraits& device, const std::string& commit) {
  nlohmann::ordered_json json = {{"communicator", result.communicator},
                                 {"device", device.name},
                                 {"ranks", result.ranks},
                                 {"quern", QUERN_VERSION},
                                 {"commit", commit},
                                 {"link_rate", result.link_rate}};
  for (const CollectiveTime& time : result.times)
    json["collectives"].push_back({{"collective", time.collective},
                                   {"bytes", time.bytes},
                                   {"seconds", time.seconds},
                                   {"bus_rate", time.bus_rate}});
  if (result.product)
    json["product"] = {{"alone", result.product->alone},
                       {"beside", result.product->beside},
                       {"covered", result.product->covered},
                       {"clock_alone", result.product->clock_alone},
                       {"clock_beside", result.product->clock_beside},
                       {"at_equal_clocks", result.product->at_equal_clocks}};
  return json.dump(1) + "\n";
}

}  // namespace quern::bench
