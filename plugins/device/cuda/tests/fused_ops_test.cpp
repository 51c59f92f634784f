// On the GPU, bit for bit: fused forms give what the ops that they replace give, outputs in place of inputs give what
// outputs apart give, and addresses that cannot be read by packs change no bit. Without a GPU nothing can be compared.
#include <cmath>

#include "quern/rope.h"
#include "quern/step_state.h"
#include "tests/gpu_run.h"

using namespace quern;
using namespace quern::cuda;

namespace {

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32;

std::string label(const std::string& size, DType type, std::size_t shift) {
  return size + " " + std::string(name_of(type)) + ", moved by " + std::to_string(shift);
}

const Extents kSizes[] = {{33, 17}, {19, 896}, {40, 1032}, {7, 3584}, {5, 8200}, {700, 64}};
constexpr std::size_t kShifts[] = {0, 1};

}  // namespace

TEST_CASE("norms fused with the add beside them give the same bits") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  for (const Extents& size : kSizes) {
    for (DType t : {kF32, kBf16}) {
      for (std::size_t shift : kShifts) {
        CAPTURE(label(to_string(size), t, shift));
        Device& gpu = *pair.gpu;
        const Attributes eps{{"eps", 1e-6}};
        const Extents w{size[1]}, r{size[0]};
        const Operand stream = operand(t, size), stats = operand(kF32, r), sum = operand(kF32, w);
        PoisonedTensor a = normal(t, size, 1), b = normal(t, size, 2), e = normal(t, size, 3), weight = normal(t, w, 4);
        PoisonedTensor bias = normal(t, w, 5), mean = normal(kF32, r, 6), rstd = normal(kF32, r, 7, 0.1, 1);
        PoisonedTensor added = std::move(Run{"add", {}, {stream}}(gpu, {a.view(), b.view()})[0]);

        Tensors plain = Run{"rms_norm", eps, {stream, stats}}(gpu, {added.view(), weight.view()});
        Tensors fused = Run{"add_rms_norm", eps, {stream, stream, stats}, {}, {{0, 0}, {1, 1}}, shift}(
            gpu, {a.view(), b.view(), weight.view()});
        CHECK(difference(fused[0], added) == "");
        for (std::size_t i : {0, 1}) CHECK(difference(fused[i + 1], plain[i]) == "");

        plain = Run{"layer_norm", eps, {stream, stats, stats}}(gpu, {added.view(), weight.view(), bias.view()});
        fused = Run{"add_layer_norm", eps, {stream, stream, stats, stats}, {}, {{0, 1}}, shift}(
            gpu, {a.view(), b.view(), weight.view(), bias.view()});
        CHECK(difference(fused[0], added) == "");
        for (std::size_t i : {0, 1, 2}) CHECK(difference(fused[i + 1], plain[i]) == "");

        plain = Run{"rms_norm_grad", {}, {stream, sum}}(gpu, {a.view(), b.view(), weight.view(), rstd.view()});
        PoisonedTensor both = std::move(Run{"add", {}, {stream}}(gpu, {plain[0].view(), e.view()})[0]);
        fused = Run{"rms_norm_grad_add", {}, {stream, sum, stream}, {}, {{0, 0}, {2, 4}}, shift}(
            gpu, {a.view(), b.view(), weight.view(), rstd.view(), e.view()});
        for (std::size_t i : {0, 1}) CHECK(difference(fused[i], plain[i]) == "");
        CHECK(difference(fused[2], both) == "");
        fused = Run{"rms_norm_grad_add", {}, {operand(t, size, false), sum, stream}, {}, {{2, 0}}, shift}(
            gpu, {a.view(), b.view(), weight.view(), rstd.view(), e.view()});
        CHECK(difference(fused[2], both) == "");

        plain = Run{"layer_norm_grad", {}, {stream, sum, sum}}(
            gpu, {a.view(), b.view(), weight.view(), mean.view(), rstd.view()});
        both = std::move(Run{"add", {}, {stream}}(gpu, {plain[0].view(), e.view()})[0]);
        fused = Run{"layer_norm_grad_add", {}, {operand(t, size, false), sum, sum, stream}, {}, {{3, 0}}, shift}(
            gpu, {a.view(), b.view(), weight.view(), mean.view(), rstd.view(), e.view()});
        for (std::size_t i : {1, 2}) CHECK(difference(fused[i], plain[i]) == "");
        CHECK(difference(fused[3], both) == "");
      }
    }
  }
}

TEST_CASE("rms_norm's gradient has the same bits beside the add and at any address where blocks take several rows") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  // More rows than the GPU takes at once, at sizes where the kernels' registers differ most.
  for (auto [t, size] :
       {std::pair{kF32, Extents{2000, 1400}}, {kF32, Extents{2000, 2800}}, {kBf16, Extents{9000, 200}}}) {
    const Operand stream = operand(t, size), sum = operand(kF32, {size[1]});
    PoisonedTensor dy = normal(t, size, 1), x = normal(t, size, 2), e = normal(t, size, 3);
    PoisonedTensor weight = normal(t, {size[1]}, 4), rstd = normal(kF32, {size[0]}, 6, 0.1, 1);
    Tensors plain =
        Run{"rms_norm_grad", {}, {stream, sum}}(*pair.gpu, {dy.view(), x.view(), weight.view(), rstd.view()});
    PoisonedTensor both = std::move(Run{"add", {}, {stream}}(*pair.gpu, {plain[0].view(), e.view()})[0]);
    for (std::size_t shift : kShifts) {
      CAPTURE(label(to_string(size), t, shift));
      Tensors fused = Run{"rms_norm_grad_add", {}, {stream, sum, stream}, {}, {}, shift}(
          *pair.gpu, {dy.view(), x.view(), weight.view(), rstd.view(), e.view()});
      for (std::size_t i : {0, 1}) CHECK(difference(fused[i], plain[i]) == "");
      CHECK(difference(fused[2], both) == "");
    }
  }
}

TEST_CASE("layer_norm's gradient has the same bits beside the add and at any address where blocks take several rows") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  const Extents size{4300, 64}, w{64}, r{4300};  // more than 528 blocks of 8 rows
  for (DType t : {kF32, kBf16}) {
    const Operand stream = operand(t, size), sum = operand(kF32, w);
    PoisonedTensor dy = normal(t, size, 1), x = normal(t, size, 2), e = normal(t, size, 3), weight = normal(t, w, 4);
    PoisonedTensor mean = normal(kF32, r, 5), rstd = normal(kF32, r, 6, 0.1, 1);
    Tensors plain = Run{"layer_norm_grad", {}, {stream, sum, sum}}(
        *pair.gpu, {dy.view(), x.view(), weight.view(), mean.view(), rstd.view()});
    PoisonedTensor both = std::move(Run{"add", {}, {stream}}(*pair.gpu, {plain[0].view(), e.view()})[0]);
    for (std::size_t shift : kShifts) {
      CAPTURE(label(to_string(size), t, shift));
      Tensors fused = Run{"layer_norm_grad_add", {}, {stream, sum, sum, stream}, {}, {}, shift}(
          *pair.gpu, {dy.view(), x.view(), weight.view(), mean.view(), rstd.view(), e.view()});
      for (std::size_t i : {0, 1, 2}) CHECK(difference(fused[i], plain[i]) == "");
      CHECK(difference(fused[3], both) == "");
    }
  }
}

TEST_CASE("swiglu_and_grad gives the bits of swiglu and swiglu_grad") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  for (const Extents& size : kSizes) {
    for (DType t : {kF32, kBf16}) {
      for (std::size_t shift : kShifts) {
        CAPTURE(label(to_string(size), t, shift));
        const Extents packed{size[0], 2 * size[1]};
        const Operand half = operand(t, size), whole = operand(t, packed);
        PoisonedTensor gate_up = normal(t, packed, 1, 3), dy = normal(t, size, 2);
        Tensors y = Run{"swiglu", {}, {half}}(*pair.gpu, {gate_up.view()});
        Tensors d = Run{"swiglu_grad", {}, {whole}}(*pair.gpu, {dy.view(), gate_up.view()});
        Run fused{"swiglu_and_grad", {}, {half, whole}, {}, {{0, 1}, {1, 0}}, shift};
        Tensors both = fused(*pair.gpu, {gate_up.view(), dy.view()});
        CHECK(difference(both[0], y[0]) == "");
        CHECK(difference(both[1], d[0]) == "");
      }
    }
  }
}

TEST_CASE("head_norm_rope and rope_grad_head_norm_grad give the bits of their parts, in place too") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  struct Heads {
    std::int64_t tokens, heads, kv_heads, head_dim;
    bool width = false;  ///< a norm of all heads together
  };
  for (Heads h : {Heads{9, 3, 1, 6},
                  {33, 14, 2, 64},
                  {20, 4, 2, 128},
                  {7, 2, 1, 34},
                  {5, 1, 1, 256},
                  {9, 3, 1, 6, true},
                  {33, 14, 2, 64, true},
                  {7, 2, 2, 34, true},
                  {530, 2, 1, 16, true}}) {
    for (DType t : {kF32, kBf16}) {
      for (std::size_t shift : kShifts) {
        CAPTURE(label("head_dim " + std::to_string(h.head_dim) + (h.width ? ", of all" : ""), t, shift));
        RopeFrequencies frequencies = rope_frequencies({}, h.head_dim);
        Attributes attributes{{"heads", h.heads},
                              {"kv_heads", h.kv_heads},
                              {"head_dim", h.head_dim},
                              {"eps", 1e-6},
                              {"inverse_frequencies", frequencies.inverse},
                              {"magnitude", 1.25}};
        if (h.width) attributes.set("over", std::string("width"));
        const Geometry geometry{1, h.tokens};
        const Extents size{h.tokens, (h.heads + 2 * h.kv_heads) * h.head_dim};
        const Operand packed = operand(t, size), stats = operand(kF32, {h.tokens, h.width ? 2 : h.heads + h.kv_heads});
        const Extents of_query{h.head_dim * (h.width ? h.heads : 1)}, of_key{h.head_dim * (h.width ? h.kv_heads : 1)};
        PoisonedTensor qkv = normal(t, size, 1), query = normal(t, of_query, 2), key = normal(t, of_key, 3);
        PoisonedTensor positions = integers(h.tokens, 0, h.tokens, 4);
        Run norm{"head_norm", attributes, {packed, stats}, geometry};
        Tensors normed = norm(*pair.gpu, {qkv.view(), query.view(), key.view()});
        Run rope{"rope", attributes, {packed}, geometry};
        Tensors rotated = rope(*pair.gpu, {normed[0].view(), positions.view()});
        rope.in_place = {{0, 0}};
        CHECK(difference(rope(*pair.gpu, {normed[0].view(), positions.view()})[0], rotated[0]) == "");
        Run fused{"head_norm_rope", attributes, {packed, stats, packed}, geometry, {{0, 0}}, shift};
        Tensors all = fused(*pair.gpu, {qkv.view(), query.view(), key.view(), positions.view()});
        for (std::size_t i : {0, 1}) CHECK(difference(all[i], normed[i]) == "");
        CHECK(difference(all[2], rotated[0]) == "");
        Run over{"head_norm_rope", attributes, {operand(t, size, false), stats, packed}, geometry, {{2, 0}}, shift};
        CHECK(difference(over(*pair.gpu, {qkv.view(), query.view(), key.view(), positions.view()})[2], rotated[0]) ==
              "");

        PoisonedTensor dy = normal(t, size, 5);
        Tensors turned = Run{"rope_grad", attributes, {packed}, geometry}(*pair.gpu, {dy.view(), positions.view()});
        for (const bool accumulate : {false, true}) {
          const Operand dquery{t, of_query, true, accumulate}, dkey{t, of_key, true, accumulate};
          Tensors parts = Run{"head_norm_grad", attributes, {packed, dquery, dkey}, geometry}(
              *pair.gpu, {turned[0].view(), qkv.view(), query.view(), key.view(), normed[1].view()});
          Run backward{
              "rope_grad_head_norm_grad", attributes, {packed, packed, dquery, dkey}, geometry, {{1, 0}}, shift};
          Tensors both = backward(
              *pair.gpu, {dy.view(), positions.view(), qkv.view(), query.view(), key.view(), normed[1].view()});
          CHECK(difference(both[0], turned[0]) == "");
          for (std::size_t i : {0, 1, 2}) CHECK(difference(both[i + 1], parts[i]) == "");
        }
      }
    }
  }
}

TEST_CASE("rope_grad_column_sum gives the bits of rope_grad and column_sum, in place too") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  struct Heads {
    std::int64_t tokens, heads, kv_heads, head_dim;
    bool outside = false;  ///< positions before the table and behind it
  };
  for (Heads h : {Heads{1, 2, 1, 64},
                  {9, 3, 1, 6},
                  {127, 14, 2, 64},
                  {130, 4, 2, 128},
                  {259, 2, 1, 34},
                  {128, 1, 1, 256},
                  {1027, 1, 1, 80},
                  {11, 3, 1, 6, true},
                  {130, 2, 1, 64, true}}) {
    for (DType t : {kF32, kBf16}) {
      for (std::size_t shift : kShifts) {
        CAPTURE(label(std::to_string(h.tokens) + " tokens, head_dim " + std::to_string(h.head_dim), t, shift));
        RopeFrequencies frequencies = rope_frequencies({}, h.head_dim);
        const Attributes attributes{{"heads", h.heads},
                                    {"kv_heads", h.kv_heads},
                                    {"head_dim", h.head_dim},
                                    {"inverse_frequencies", frequencies.inverse},
                                    {"magnitude", 1.25}};
        const Geometry geometry{1, h.tokens};
        const Extents size{h.tokens, (h.heads + 2 * h.kv_heads) * h.head_dim};
        const Operand packed = operand(t, size);
        PoisonedTensor dy = normal(t, size, 1), positions = integers(h.tokens, 0, h.tokens, 4);
        if (h.outside) {
          positions.view().as<std::int32_t>()[0] = -1;
          positions.view().as<std::int32_t>()[h.tokens - 1] = static_cast<std::int32_t>(h.tokens);
        }
        Tensors turned = Run{"rope_grad", attributes, {packed}, geometry}(*pair.gpu, {dy.view(), positions.view()});
        for (DType sum_type : {kF32, kBf16}) {
          for (bool accumulate : {false, true}) {
            const Operand sum{sum_type, {size[1]}, true, accumulate};
            Tensors sums = Run{"column_sum", {}, {sum}}(*pair.gpu, {turned[0].view()});
            Run fused{"rope_grad_column_sum", attributes, {packed, sum}, geometry, {}, shift};
            for (bool in_place : {false, true}) {
              if (in_place) fused.in_place = {{0, 0}};
              Tensors both = fused(*pair.gpu, {dy.view(), positions.view()});
              CHECK(difference(both[0], turned[0]) == "");
              CHECK(difference(both[1], sums[0]) == "");
            }
            fused.in_place = {};
            fused.outputs[0].present = false;
            CHECK(difference(fused(*pair.gpu, {dy.view(), positions.view()})[1], sums[0]) == "");
          }
        }
      }
    }
  }
}

TEST_CASE("column_sum gives the same bits at any address") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  for (const Extents& size : {Extents{1, 8}, Extents{126, 1152}, Extents{131, 136}, Extents{700, 64}}) {
    for (DType t : {kF32, kBf16}) {
      CAPTURE(label(to_string(size), t, 1));
      PoisonedTensor x = normal(t, size, 1);
      const Operand sum = operand(kF32, {size[1]});
      Tensors sums = Run{"column_sum", {}, {sum}}(*pair.gpu, {x.view()});
      CHECK(difference(Run{"column_sum", {}, {sum}, {}, {}, 1}(*pair.gpu, {x.view()})[0], sums[0]) == "");
    }
  }
}

TEST_CASE("adamw gives the same bits at any address, and in shards") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  constexpr std::int64_t kCount = 9001, kCut = 4 * 1237;
  for (DType gradient_type : {kF32, kBf16}) {
    for (DType t : {kF32, kBf16}) {
      CAPTURE(label("gradients " + std::string(name_of(gradient_type)), t, 0));
      UpdateState update;
      update.gradient_scale = 0.5f;
      update.apply = 1;
      StepState step;
      step.step = 7, step.updates = 3;
      step.seed_low = 17;
      step.learning_rate = 0.01f;
      PoisonedTensor scale = words(kF32, update), state = words(DType::u32, step);
      PoisonedTensor gradient = normal(gradient_type, {kCount}, 1), master = normal(t, {kCount}, 2);
      PoisonedTensor moment1 = normal(t, {kCount}, 3, 0.1), moment2 = normal(t, {kCount}, 4, 0.001, 0.01);
      auto updated = [&](std::int64_t begin, std::int64_t count, std::size_t shift) {
        Attributes attributes{{"beta1", 0.9},
                              {"beta2", 0.95},
                              {"eps", 1e-8},
                              {"weight_decay", 0.1},
                              {"offsets", std::vector<double>{static_cast<double>(begin)}},
                              {"objects", std::vector<double>{5}}};
        auto part = [&](const PoisonedTensor& whole) {
          const View& view = whole.view();
          return View{view.as<char>() + static_cast<std::size_t>(begin) * size_of(view.dtype), view.dtype, {count}};
        };
        const Operand state_operand = operand(t, {count});
        Run run{"adamw", attributes, {state_operand, state_operand, state_operand}, {}, {{0, 3}, {1, 4}, {2, 5}},
                shift};
        return run(*pair.gpu, {scale.view(), state.view(), part(gradient), part(master), part(moment1), part(moment2)});
      };
      Tensors whole = updated(0, kCount, 0), moved = updated(0, kCount, 1);
      Tensors first = updated(0, kCut, 0), second = updated(kCut, kCount - kCut, 0);
      for (std::size_t i = 0; i < 3; ++i) {
        CHECK(difference(moved[i], whole[i]) == "");
        const std::size_t cut = first[i].view().bytes();
        CHECK(std::memcmp(first[i].view().data, whole[i].view().data, cut) == 0);
        CHECK(std::memcmp(second[i].view().data, whole[i].view().as<char>() + cut, second[i].view().bytes()) == 0);
      }
    }
  }
}
