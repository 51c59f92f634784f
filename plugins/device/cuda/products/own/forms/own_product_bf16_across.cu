#include "products/own/own_product_form.cuh"

namespace quern::cuda {

using namespace product;
const OwnProduct kBf16AcrossProduct = own_product<StraightSums<OfBf16, Columns::across>, Lies::straight>();

}  // namespace quern::cuda
