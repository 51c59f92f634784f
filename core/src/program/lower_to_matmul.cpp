#include "quern/precision.h"

namespace quern {

void lower_to_matmul(const ProductSite& site, Lowering& lowering) {
  auto matmul = [&lowering](std::vector<ValueId> inputs, std::int64_t transpose_a, std::int64_t transpose_b) {
    lowering.produce("matmul", std::move(inputs), {{"transpose_a", transpose_a}, {"transpose_b", transpose_b}});
  };
  switch (site.product) {
    case Product::output: return matmul({site.x, site.weight, site.bias}, 0, 1);
    case Product::input_gradient: return matmul({site.dy, site.weight}, 0, 0);
    case Product::weight_gradient: return matmul({site.dy, site.x}, 1, 0);
    case Product::loss: return;
  }
}

}  // namespace quern
