#include "products/own_product_form.cuh"

namespace quern::cuda {

using Form = product::OwnProductForm<product::OfFloat8<DType::e5m2, DType::e4m3>>;
const OwnProduct kE5m2Product{Form::load, Form::run};

}  // namespace quern::cuda
