#include "bench/products.h"

#include <algorithm>
#include <memory>
#include <set>

#include "bench/peaks.h"

namespace quern::bench {

namespace {

/// Seconds of the matmul on each device, the means of two turns, there and back: what changes slowly, such as the
/// clock, weighs on all alike. A turn that does not count comes first: from idle a GPU runs faster than its power lets
/// it go on.
std::vector<double> seconds_in_turn(const std::vector<Device*>& devices, const ProductForm& form) {
  constexpr double kEnough = 0.1;  // seconds of a turn, in which clocks become steady
  std::vector<std::unique_ptr<RandomProduct>> products;
  for (Device* device : devices) products.push_back(std::make_unique<RandomProduct>(*device, product_op(form, true)));
  auto turn = [&](std::size_t i) {
    auto run = [&] { products[i]->launch(); };
    const double first = std::max(median_seconds(*devices[i], run, 1), 1e-9);
    const auto samples = static_cast<std::size_t>(std::clamp(kEnough / first, 3.0, 1000.0));
    return median_seconds(*devices[i], run, samples);
  };
  turn(0);
  const std::size_t count = devices.size();
  std::vector<double> seconds(count, 0.0);
  for (std::size_t i = 0; i < count; ++i) seconds[i] += turn(i) / 2;
  for (std::size_t i = count; i-- > 0;) seconds[i] += turn(i) / 2;
  return seconds;
}

/// A format's cases, at no size yet.
std::vector<ProductForm> forms_of(DType format, const std::vector<ProductScales>& scales) {
  const bool scaled = size_of(format) == 1;
  std::vector<ProductForm> forms;
  for (const ProductScales mode : scaled ? scales : std::vector{ProductScales::none})
    for (const bool transpose_a : {false, true})
      for (const bool transpose_b : {true, false})
        forms.push_back({.format = format, .scales = mode, .transpose_a = transpose_a, .transpose_b = transpose_b});
  return forms;
}

/// Each reason for skipping is printed once.
void leave_out(ProductsBenchResult& result, const ProductForm& form, const std::string& reason) {
  const std::string text = std::string(name_of(form.format)) + " " + name_of(form.scales) + " " + layout_of(form);
  const auto same = [&](const std::string& other) { return other.starts_with(text); };
  if (std::none_of(result.left_out.begin(), result.left_out.end(), same))
    result.left_out.push_back(text + ": " + reason);
}

}  // namespace

std::vector<ProductSize> product_sizes(const Plan& plan) {
  std::set<ProductSize> seen;
  std::vector<ProductSize> sizes;
  for (const Task& task : plan.schedules.tasks) {
    const OpInstance& op = task.instance;
    if (!op.kind.starts_with("matmul")) continue;
    const Extents &a = op.inputs[0].extents, &b = op.inputs[1].extents;
    const bool transpose_a = op.attributes.integer_or("transpose_a", 0) != 0,
               transpose_b = op.attributes.integer_or("transpose_b", 0) != 0;
    const ProductSize size{a[transpose_a ? 1 : 0], b[transpose_b ? 0 : 1], a[transpose_a ? 0 : 1]};
    if (seen.insert(size).second) sizes.push_back(size);
  }
  return sizes;
}

ProductsBenchResult run_products_bench(Device& device, const ProductsBenchOptions& options) {
  ProductsBenchResult result;
  options.print(products_table_head(device.traits(), options.beside != nullptr));
  for (const DType format : options.formats)
    for (ProductForm form : forms_of(format, options.scales))
      for (const ProductSize& size : options.sizes) {
        form.m = size.m, form.n = size.n, form.k = size.k;
        const OpInstance op = product_op(form, true);
        if (const std::string refusal = device.query(op).refusal; !refusal.empty()) {
          leave_out(result, form, refusal);
          continue;
        }
        std::vector<Device*> devices{&device};
        if (options.beside != nullptr && options.beside->query(op).refusal.empty()) devices.push_back(options.beside);
        const std::vector<double> seconds = seconds_in_turn(devices, form);
        ProductTime time{form, seconds.front()};
        if (devices.size() > 1) time.beside = seconds.back();
        result.times.push_back(time);
        options.print(products_table_line(time, device.traits()));
      }
  if (options.int4)
    result.left_out.emplace_back(
        "int4: quern has no kernels that multiply it; precision int4 has int8 matmuls (i8), low_bit multiplies "
        "dequantized bf16");
  options.print(products_by_size(result, device.traits()));
  options.print(products_table_end(result));
  return result;
}

}  // namespace quern::bench
