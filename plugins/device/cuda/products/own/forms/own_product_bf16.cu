#include "products/own/own_product_form.cuh"

namespace quern::cuda {

using namespace product;
const OwnProduct kBf16Product = own_product<StraightSums<OfBf16, Columns::along>, Lies::straight>();

}  // namespace quern::cuda
