#include "shared/collectives/rank_reduction.h"

#include <string>

#include "quern/error.h"

namespace quern::collectives {

OpInstance RankReduction::instance(DType dtype, Reduction reduction, std::int64_t count, bool apart) const {
  OpInstance op{.kind = "reduce_ranks", .geometry = {}};
  op.inputs.push_back({dtype, {ranks_, count}, true, false});
  op.outputs.push_back({dtype, {count}, true, false});
  op.attributes = {{"reduction", std::string(reduction == Reduction::sum ? "sum" : "maximum")}};
  if (!apart) return op;
  op.inputs.push_back(op.outputs[0]);
  op.attributes.set("own", std::int64_t{rank_});
  return op;
}

RankReduction::RankReduction(const char* where, Device& device, int rank, int ranks)
    : device_(device), rank_(rank), ranks_(ranks) {
  if (const OpSupport support = device.query(instance(DType::f32, Reduction::sum, 1, true));
      !support.refusal.empty() || support.workspace_bytes > 0)
    throw Error(ErrorCode::config, {.where = where,
                                    .what = "the device has no sum over ranks",
                                    .found = support.refusal,
                                    .expected = "a kernel of reduce_ranks without workspace",
                                    .next = "choose another communicator or device"});
}

void RankReduction::launch(void* staged, void* own, const View& out, Reduction reduction, Stream stream) {
  auto& kernel = kernels_[{out.dtype, reduction, out.count(), own != nullptr}];
  if (!kernel) kernel = device_.prepare(instance(out.dtype, reduction, out.count(), own != nullptr));
  const View in[] = {{staged, out.dtype, {ranks_, out.count()}}, {own, out.dtype, out.extents}};
  kernel->launch({in, own ? std::size_t{2} : std::size_t{1}}, {&out, 1}, {.stream = stream});
}

}  // namespace quern::collectives
