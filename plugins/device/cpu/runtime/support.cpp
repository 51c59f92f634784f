#include "runtime/support.h"

#include <algorithm>

#include "primitives/rows.h"
#include "quern/error.h"

namespace quern::cpu {

void check_indices(const View& indices, std::int32_t lowest, std::int64_t vocabulary, const char* what) {
  const auto* index = indices.as<std::int32_t>();
  const auto* end = index + indices.count();
  const auto* bad = std::find_if(index, end, [&](std::int32_t i) { return i < lowest || i >= vocabulary; });
  if (bad == end) return;
  throw Error(ErrorCode::input, {.where = std::string(what) + "[" + std::to_string(bad - index) + "]",
                                 .what = "not in the vocabulary",
                                 .found = std::to_string(*bad),
                                 .expected = std::to_string(lowest) + " to " + std::to_string(vocabulary - 1),
                                 .next = "check that the data were tokenized for this model"});
}

const float* load_all(const View& view, float* panel) {
  if (view.dtype == DType::f32) return view.as<float>();
  constexpr std::int64_t kChunk = 8192;
  const std::int64_t count = view.count(), chunks = (count + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < chunks; ++i) {
    load(view, i * kChunk, std::min(kChunk, count - i * kChunk), panel + i * kChunk);
  }
  return panel;
}

}  // namespace quern::cpu
