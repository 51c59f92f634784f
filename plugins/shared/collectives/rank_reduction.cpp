#include "shared/collectives/rank_reduction.h"

#include <string>

#include "quern/error.h"

namespace quern::collectives {

namespace {

OpInstance reduction_of(DType dtype, Reduction reduction, std::int64_t ranks, std::int64_t count) {
  OpInstance op{.kind = "reduce_ranks", .geometry = {}};
  op.inputs.push_back({dtype, {ranks, count}, true, false});
  op.outputs.push_back({dtype, {count}, true, false});
  op.attributes = {{"reduction", std::string(reduction == Reduction::sum ? "sum" : "maximum")}};
  return op;
}

}  // namespace

RankReduction::RankReduction(const char* where, Device& device, int ranks) : device_(device), ranks_(ranks) {
  if (const OpSupport support = device.query(reduction_of(DType::f32, Reduction::sum, ranks, 1));
      !support.refusal.empty() || support.workspace_bytes > 0)
    throw Error(ErrorCode::config, {.where = where,
                                    .what = "the device has no sum over ranks",
                                    .found = support.refusal,
                                    .expected = "a kernel of reduce_ranks without workspace",
                                    .next = "choose another communicator or device"});
}

void RankReduction::launch(void* staged, const View& out, Reduction reduction, Stream stream) {
  auto& kernel = kernels_[{out.dtype, reduction, out.count()}];
  if (!kernel) kernel = device_.prepare(reduction_of(out.dtype, reduction, ranks_, out.count()));
  const View in{staged, out.dtype, {ranks_, out.count()}};
  kernel->launch({&in, 1}, {&out, 1}, {.stream = stream});
}

}  // namespace quern::collectives
