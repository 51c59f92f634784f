#pragma once
// Measures matmuls over formats, scales, layouts and sizes: what `quern bench products` prints.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/files/descriptor.h"
#include "bench/random_product.h"
#include "plan/plan.h"

namespace quern::bench {

struct ProductSize {
  std::int64_t m = 0, n = 0, k = 0;
  auto operator<=>(const ProductSize&) const = default;
};

struct ProductTime {
  ProductForm form;
  double seconds = 0;  ///< the median of several
  double beside = 0;   ///< on the other device; 0: there is none, or it does not take the matmul
};

struct ProductsBenchResult {
  std::vector<ProductTime> times = {};
  std::vector<std::string> left_out = {};  ///< forms that the device does not take, and why
};

struct ProductsBenchOptions {
  std::vector<DType> formats;
  std::vector<ProductScales> scales;  ///< of 8-bit formats
  std::vector<ProductSize> sizes;
  bool int4 = false;         ///< asked for: it has no matmuls, which is said
  Device* beside = nullptr;  ///< another device that is open, whose matmuls are timed in turn with the first one's
  /// Gets the table, a line as soon as it is known.
  std::function<void(const std::string& text)> print;
};

/// The sizes of the matmuls in a training step, each once.
std::vector<ProductSize> product_sizes(const Plan& plan);

/// "tensor", "row", "1x128", "128x128", "squares"; "" for none.
std::string name_of(ProductScales scales);
/// The layouts of both operands in BLAS's letters: "NT" for y = a b^T.
std::string layout_of(const ProductForm& form);

/// Every form that `device`, which is open, takes.
ProductsBenchResult run_products_bench(Device& device, const ProductsBenchOptions& options);

/// The table's head, a line of it, and its end.
std::string products_table_head(const DeviceTraits& device, bool beside);
std::string products_table_line(const ProductTime& time, const DeviceTraits& device);
std::string products_table_end(const ProductsBenchResult& result);
/// Of several sizes, in Markdown: a row for each format, scales and layout, a column for each size, TFLOP/s and the
/// share of the rated peak. Empty for one size.
std::string products_by_size(const ProductsBenchResult& result, const DeviceTraits& device);
/// `beside`: the setting of the other device.
std::string products_bench_json(const ProductsBenchResult& result, const DeviceTraits& device,
                                const std::string& beside, const std::string& commit);
/// How the text of products_bench_json begins.
inline constexpr FileKind kProductsBenchFile{"a file of quern bench products", "{\n \"products_of\": \""};

}  // namespace quern::bench
