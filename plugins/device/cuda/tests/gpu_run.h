#pragma once
// For tests that compare ops on the GPU with each other: launches and their results.

#include <cstring>
#include <utility>
#include <vector>

#include "quern/testkit/op_launch.h"
#include "tests/device_pair.h"

namespace quern::cuda {

using testkit::PoisonedTensor;
using Tensors = std::vector<PoisonedTensor>;

/// What one launch on the GPU does with copies of operands.
struct Run {
  std::string kind;
  Attributes attributes = {};
  std::vector<Operand> outputs = {};
  Geometry geometry = {};
  std::vector<std::pair<int, int>> in_place = {};  ///< output, input
  std::size_t shift = 0;                           ///< elements by which bf16 and fp32 operands are moved off 16 bytes

  Tensors operator()(Device& gpu, const std::vector<View>& inputs) const {
    OpInstance op{kind, {}, outputs, attributes, geometry};
    for (const View& input : inputs) op.inputs.push_back({input.dtype, input.extents, true, false});
    OpSupport support = gpu.query(op);
    REQUIRE(support.refusal == "");
    Stream stream = gpu.stream(StreamKind::compute);
    std::vector<void*> blocks;
    auto allocate = [&](std::size_t bytes) {
      blocks.push_back(gpu.allocate(MemoryKind::device, bytes + 256));
      gpu.fill(blocks.back(), 0xFF, bytes + 256, stream);
      return static_cast<char*>(blocks.back());
    };
    auto place = [&](DType dtype, const Extents& extents) {
      View view{nullptr, dtype, extents};
      bool moves = dtype == DType::bf16 || dtype == DType::f32;
      view.data = allocate(view.bytes()) + (moves ? shift * size_of(dtype) : 0);
      return view;
    };
    std::vector<View> in, out;
    for (const View& input : inputs) {
      in.push_back(place(input.dtype, input.extents));
      gpu.copy(in.back().data, input.data, input.bytes(), stream);
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      View view;
      for (auto [output, input] : in_place)
        if (output == static_cast<int>(i)) view = in[static_cast<std::size_t>(input)];
      out.push_back(view || !outputs[i].present ? view : place(outputs[i].dtype, outputs[i].extents));
    }
    for (std::size_t i = 0; i < outputs.size(); ++i)
      if (outputs[i].accumulate) testkit::fill_added_to(gpu, out[i], stream);
    gpu.prepare(op)->launch(in, out, {stream, allocate(support.workspace_bytes)});
    Tensors results;
    for (const View& view : out) {
      results.emplace_back(view.dtype, view.extents);
      if (view) gpu.copy(results.back().view().data, view.data, view.bytes(), stream);
    }
    gpu.synchronize(stream);
    for (void* block : blocks) gpu.release(MemoryKind::device, block);
    return results;
  }
};

inline Operand operand(DType dtype, Extents extents, bool present = true) {
  return {dtype, std::move(extents), present, false};
}

/// Empty when both hold the same bytes.
inline std::string difference(const PoisonedTensor& got, const PoisonedTensor& want) {
  const View &a = got.view(), &b = want.view();
  if (a.bytes() == b.bytes() && std::memcmp(a.data, b.data, a.bytes()) == 0) return {};
  return "bits differ: " + testkit::mismatch(got.floats(), want.floats(), 0);
}

}  // namespace quern::cuda
