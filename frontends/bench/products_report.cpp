#include <algorithm>
#include <map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bench/products.h"
#include "plan/time/estimate.h"

namespace quern::bench {

std::string name_of(ProductScales scales) {
  switch (scales) {
    case ProductScales::none: return "";
    case ProductScales::tensor: return "tensor";
    case ProductScales::row: return "row";
    case ProductScales::line: return "1x128";
    case ProductScales::square: return "128x128";
    case ProductScales::squares: return "squares";
  }
  return "";
}

std::string layout_of(const ProductForm& form) {
  return std::string(form.transpose_a ? "T" : "N") + (form.transpose_b ? "T" : "N");
}

std::string products_table_head(const DeviceTraits& device, bool beside) {
  return fmt::format("{}\n\n{:<8}{:<9}{:<8}{:>8}{:>8}{:>8}{:>12}{:>10}{:>10}{}\n", device.name, "format", "scales",
                     "layout", "m", "n", "k", "time", "TFLOP/s", "of rated",
                     beside ? fmt::format("{:>16}{:>8}", "beside TFLOP/s", "ratio") : "");
}

std::string products_table_line(const ProductTime& time, const DeviceTraits& device) {
  const ProductForm& form = time.form;
  const double rate = form.flops() / time.seconds, rated = matmul_rate(device, form.format);
  const std::string share = rated > 0 ? fmt::format("{:>9.1f}%", 100 * rate / rated) : "";
  const std::string beside =
      time.beside > 0 ? fmt::format("{:>16.4g}{:>8.3f}", form.flops() / time.beside / 1e12, time.seconds / time.beside)
                      : "";
  return fmt::format("{:<8}{:<9}{:<8}{:>8}{:>8}{:>8}{:>12}{:>10.4g}{:>10}{}\n", name_of(form.format),
                     name_of(form.scales), layout_of(form), form.m, form.n, form.k,
                     fmt::format("{:.1f} us", 1e6 * time.seconds), rate / 1e12, share, beside);
}

std::string products_by_size(const ProductsBenchResult& result, const DeviceTraits& device) {
  std::vector<ProductSize> sizes;
  std::vector<std::string> rows;
  std::map<std::pair<std::string, ProductSize>, std::string> cells;
  auto note = [](auto& list, const auto& item) {
    if (std::find(list.begin(), list.end(), item) == list.end()) list.push_back(item);
  };
  for (const ProductTime& time : result.times) {
    const ProductForm& form = time.form;
    const ProductSize size{form.m, form.n, form.k};
    const std::string row =
        fmt::format("| {:<6} | {:<7} | {:<6} |", name_of(form.format), name_of(form.scales), layout_of(form));
    const double rate = form.flops() / time.seconds, rated = matmul_rate(device, form.format);
    const std::string share = rated > 0 ? fmt::format(", {:.1f}%", 100 * rate / rated) : "";
    note(sizes, size);
    note(rows, row);
    cells[{row, size}] = fmt::format("{:.4g}", rate / 1e12) + share;
  }
  if (sizes.size() < 2) return "";
  std::string text = "\nTFLOP/s, and of rated\n\n| format | scales  | layout |",
              rule = "\n| ------ | ------- | ------ |";
  for (const ProductSize& size : sizes) {
    const bool cube = size.m == size.n && size.n == size.k;
    text += fmt::format(" {:>14} |", cube ? std::to_string(size.m) : fmt::format("{}x{}x{}", size.m, size.n, size.k));
    rule += fmt::format(" {:->14} |", ":");
  }
  text += rule;
  for (const std::string& row : rows) {
    text += "\n" + row;
    for (const ProductSize& size : sizes) text += fmt::format(" {:>14} |", cells[{row, size}]);
  }
  return text + "\n";
}

std::string products_table_end(const ProductsBenchResult& result) {
  std::string text;
  for (const std::string& form : result.left_out) text += "not measured: " + form + "\n";
  return text.empty() ? text : "\n" + text;
}

std::string products_bench_json(const ProductsBenchResult& result, const DeviceTraits& device,
                                const std::string& beside, const std::string& commit) {
  nlohmann::ordered_json json = {{"products_of", device.name},
                                 {"quern", QUERN_VERSION},
                                 {"commit", commit},
                                 {"beside", beside},
                                 {"products", nlohmann::ordered_json::array()},
                                 {"left_out", result.left_out}};
  for (const ProductTime& time : result.times) {
    const ProductForm& form = time.form;
    nlohmann::ordered_json line = {{"format", name_of(form.format)},
                                   {"scales", name_of(form.scales)},
                                   {"layout", layout_of(form)},
                                   {"m", form.m},
                                   {"n", form.n},
                                   {"k", form.k},
                                   {"seconds", time.seconds},
                                   {"rated", matmul_rate(device, form.format)}};
    if (time.beside > 0) line["seconds_beside"] = time.beside;
    json["products"].push_back(line);
  }
  return json.dump(1) + "\n";
}

}  // namespace quern::bench
