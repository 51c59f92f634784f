#include "quern/testkit/op_launch.h"

#include <algorithm>
#include <deque>
#include <string>

#include "quern/error.h"
#include "quern/testkit/device_memory.h"

namespace quern::testkit {

namespace {

/// Bytes beside operands: NaN where they are only read, so that a read beside one shows in results; else 3.4e38 as f32
/// and as bf16, which a write of NaN changes.
constexpr std::uint8_t kBesideInputs = 0xFF, kBesideOutputs = 0x7F;

View place(std::deque<DeviceMemory>& blocks, Device& device, DType dtype, const Extents& extents, std::uint8_t beside) {
  View view{nullptr, dtype, extents};
  view.data = blocks.emplace_back(device, view.bytes(), MemoryKind::device, beside).data();
  return view;
}

}  // namespace

void fill_added_to(Device& device, const View& output, Stream stream) {
  if (output) device.fill(output.data, 0x40, output.bytes(), stream);
}

std::vector<PoisonedTensor> launch_once(Device& device, const OpInstance& shape, const std::vector<View>& inputs,
                                        const std::vector<std::pair<int, int>>& in_place) {
  OpInstance op = shape;
  op.inputs.clear();
  for (const View& input : inputs) op.inputs.push_back({input.dtype, input.extents, static_cast<bool>(input), false});
  OpSupport support = device.query(op);
  if (!support.refusal.empty()) fail_internal(op.kind, "is refused: " + support.refusal);
  Stream stream = device.stream(StreamKind::compute);
  std::deque<DeviceMemory> blocks;
  std::vector<View> in, out;
  for (const View& input : inputs) {
    const bool written = std::any_of(in_place.begin(), in_place.end(),
                                     [&](const auto& pair) { return pair.second == static_cast<int>(in.size()); });
    in.push_back(input ? place(blocks, device, input.dtype, input.extents, written ? kBesideOutputs : kBesideInputs)
                       : View{});
    if (input) device.copy(in.back().data, input.data, input.bytes(), stream);
  }
  for (const Operand& output : op.outputs) {
    out.push_back(output.present ? place(blocks, device, output.dtype, output.extents, kBesideOutputs)
                                 : View{nullptr, output.dtype, output.extents});
    if (output.accumulate) fill_added_to(device, out.back(), stream);
  }
  for (auto [output, input] : in_place) out[static_cast<std::size_t>(output)] = in[static_cast<std::size_t>(input)];
  View workspace =
      place(blocks, device, DType::u8, {static_cast<std::int64_t>(support.workspace_bytes)}, kBesideOutputs);
  std::unique_ptr<Kernel> kernel = device.prepare(op);
  kernel->launch(in, out, {stream, workspace.data});
  std::vector<PoisonedTensor> results;
  for (const auto& views : {out, in}) {
    for (const View& view : views) {
      results.emplace_back(view.dtype, view ? view.extents : Extents{0});
      if (view) device.copy(results.back().view().data, view.data, view.bytes(), stream);
    }
  }
  device.synchronize(stream);
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (const std::string side = blocks[i].touched(); !side.empty())
      fail_internal(op.kind, "has written " + side + " operand or scratch " + std::to_string(i) +
                                 ", counted over the inputs, the outputs and the scratch that are there");
  return results;
}

}  // namespace quern::testkit
