#include "products/own/own_product_form.cuh"

namespace quern::cuda {

using namespace product;
const OwnProduct kI8Product = own_product<StraightSums<OfI8, Columns::along>, Lies::straight>();

}  // namespace quern::cuda
