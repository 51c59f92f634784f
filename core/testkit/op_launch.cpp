#include "quern/testkit/op_launch.h"

#include "quern/error.h"

namespace quern::testkit {

namespace {

constexpr std::size_t kRoomBehind = 256;
/// Blocks of device memory, given back together.
class Blocks {
 public:
  explicit Blocks(Device& device) : device_(device), stream_(device.stream(StreamKind::compute)) {}
  ~Blocks() {
    for (void* block : blocks_) device_.release(MemoryKind::device, block);
  }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  View place(DType dtype, const Extents& extents) {
    View view{nullptr, dtype, extents};
    view.data = device_.allocate(MemoryKind::device, view.bytes() + kRoomBehind);
    blocks_.push_back(view.data);
    device_.fill(view.data, 0xFF, view.bytes() + kRoomBehind, stream_);
    return view;
  }

 private:
  Device& device_;
  Stream stream_;
  std::vector<void*> blocks_;
};

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
  Blocks blocks(device);
  std::vector<View> in, out;
  for (const View& input : inputs) {
    in.push_back(input ? blocks.place(input.dtype, input.extents) : View{});
    if (input) device.copy(in.back().data, input.data, input.bytes(), stream);
  }
  for (const Operand& output : op.outputs) {
    out.push_back(output.present ? blocks.place(output.dtype, output.extents)
                                 : View{nullptr, output.dtype, output.extents});
    if (output.accumulate) fill_added_to(device, out.back(), stream);
  }
  for (auto [output, input] : in_place) out[static_cast<std::size_t>(output)] = in[static_cast<std::size_t>(input)];
  View workspace = blocks.place(DType::u8, {static_cast<std::int64_t>(support.workspace_bytes)});
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
  return results;
}

}  // namespace quern::testkit
