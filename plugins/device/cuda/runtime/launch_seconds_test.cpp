// What launches are said to take: nothing faster than the hardware, and in the order that measurements have.
#include "runtime/launch_seconds.h"

#include <doctest/doctest.h>

using namespace quern;
using namespace quern::cuda;

namespace {

GpuFacts gpu(std::string_view id) {
  for (const GpuModel& model : gpu_models())
    if (model.id == id) return facts_of(model);
  FAIL("no GPU " << id);
  return {};
}

double peak(const GpuFacts& facts, DType format) {
  for (const auto& [known, rate] : facts.device.matmul_rates)
    if (known == format) return rate;
  return 0;
}

Operand matrix(DType dtype, std::int64_t rows, std::int64_t columns) {
  return {.dtype = dtype, .extents = {rows, columns}, .present = true};
}

OpInstance product(DType format, std::int64_t m, std::int64_t n, std::int64_t k) {
  return {.kind = "matmul",
          .inputs = {matrix(format, m, k), matrix(format, n, k)},
          .outputs = {matrix(DType::bf16, m, n)},
          .attributes = {{"transpose_b", std::int64_t{1}}},
          .geometry = {}};
}

/// Of the rated peak.
double share(const GpuFacts& facts, DType format, std::int64_t m, std::int64_t n, std::int64_t k) {
  const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  return flops / launch_seconds(product(format, m, n, k), facts) / peak(facts, format);
}

OpInstance attention(std::int64_t batch, std::int64_t length, bool documents) {
  const std::int64_t tokens = batch * length;
  OpInstance op{.kind = "attention",
                .inputs = {matrix(DType::bf16, tokens, 1152)},
                .outputs = {matrix(DType::bf16, tokens, 896)},
                .attributes = {{"heads", std::int64_t{14}},
                               {"kv_heads", std::int64_t{2}},
                               {"head_dim", std::int64_t{64}},
                               {"mask", std::string("causal")},
                               {"scale", 0.125}},
                .geometry = {batch, length}};
  if (documents) op.inputs.push_back(matrix(DType::i32, tokens + 1, 1));
  return op;
}

}  // namespace

TEST_CASE(
    "GEMMs reach a share of the peak that grows with their size, alike on all GPUs, and memory bounds thin ones") {
  const GpuFacts h100 = gpu("H100"), h200 = gpu("H200"), rtx4090 = gpu("RTX-4090");
  for (const GpuFacts* facts : {&h100, &h200, &rtx4090})
    for (const DType format : {DType::bf16, DType::e4m3}) {
      CHECK(share(*facts, format, 8192, 8192, 8192) / facts->reach > 0.65);
      CHECK(share(*facts, format, 8192, 8192, 8192) / facts->reach < 0.8);
      CHECK(share(*facts, format, 32768, 896, 896) < 0.97 * share(*facts, format, 32768, 9728, 896));
    }
  // At 0.5B, docs/performance/data/h100-0.5b-bf16.json: 785 and 81 us.
  CHECK(launch_seconds(product(DType::bf16, 32768, 896, 9728), h100) == doctest::Approx(785e-6).epsilon(0.15));
  CHECK(launch_seconds(product(DType::bf16, 32768, 896, 896), h100) == doctest::Approx(81e-6).epsilon(0.15));
  const double weights = 2.0 * 16384 * 16384;
  CHECK(launch_seconds(product(DType::bf16, 16, 16384, 16384), h100) > weights / h100.device.memory_rate);
}

TEST_CASE("GEMMs with block scales are slower, most of all where both operands have a scale for each row") {
  const GpuFacts h100 = gpu("H100");
  auto with_scales = [&](std::int64_t rows, std::int64_t m, std::int64_t n, std::int64_t k) {
    OpInstance op = product(DType::e4m3, m, n, k);
    if (rows != 0) op.attributes.set("scale_rows_b", rows);
    return launch_seconds(op, h100);
  };
  // The faster of the library's and own ones at 0.5B, docs/performance/cuda-fp8.md: 24 layers.
  CHECK(with_scales(128, 32768, 9728, 896) == doctest::Approx(12.8e-3 / 24).epsilon(0.15));
  CHECK(with_scales(1, 9728, 896, 32768) == doctest::Approx(16.6e-3 / 24).epsilon(0.15));
  CHECK(with_scales(0, 8192, 8192, 8192) < with_scales(128, 8192, 8192, 8192));
  CHECK(with_scales(128, 8192, 8192, 8192) < with_scales(1, 8192, 8192, 8192));
}

TEST_CASE("attention is faster a pair on longer sequences, and slower within documents but on Hopper") {
  const GpuFacts h100 = gpu("H100");
  const double brief = launch_seconds(attention(32, 1024, false), h100),
               extended = launch_seconds(attention(4, 8192, false), h100);
  CHECK(extended > 4 * brief);  // of eight times the pairs
  CHECK(extended < 8 * brief);
  GpuFacts others = h100, hopper = h100;
  others.cuda.wgmma = false;
  hopper.cuda.wgmma = true;  // masked tiles are left out, as in plans that know of one document a row
  CHECK(launch_seconds(attention(32, 1024, true), others) > 2 * brief);
  CHECK(launch_seconds(attention(32, 1024, true), hopper) == brief);
}

TEST_CASE("attention in windows takes the time of the pairs in them, and of masked ones at both ends") {
  const GpuFacts h100 = gpu("H100");
  OpInstance op = attention(4, 8192, false);
  const double whole = launch_seconds(op, h100);
  auto share = [&](std::int64_t window) {
    op.attributes.set("window", window);
    return launch_seconds(op, h100) / whole;
  };
  CHECK(share(8192) == 1);
  CHECK(share(10000) == 1);
  CHECK(share(4096) > 0.75);  // pairs
  CHECK(share(4096) < 0.9);
  CHECK(share(1024) > 0.23);
  CHECK(share(1024) < 0.4);
  CHECK(share(1) < 0.2);
  // cuDNN computes all pairs where documents are a mask, and in its gradient.
  GpuFacts others = h100;
  others.cuda.wgmma = false;
  OpInstance documents = attention(4, 8192, true);
  const double all = launch_seconds(documents, others);
  documents.attributes.set("window", std::int64_t{1024});
  CHECK(launch_seconds(documents, others) == all);
}

TEST_CASE("attention on CUDA cores takes the time of its instructions, far below the peak, on each GPU") {
  for (const char* id : {"H100", "A100", "RTX-4090", "RTX-5060-Ti-16GB"}) {
    const GpuFacts facts = gpu(id);
    for (const std::int64_t head_dim : {64, 128, 192, 256}) {
      CAPTURE(id);
      CAPTURE(head_dim);
      OpInstance op = attention(4, 1024, false);
      op.attributes.set("head_dim", head_dim);
      const double pairs = 4.0 * 14 * 1024 * 1025 / 2, seconds = slow_launch_seconds(op, facts);
      const double share = 4 * pairs * static_cast<double>(head_dim) / seconds / peak(facts, DType::f32);
      CHECK(share > 0.01);
      CHECK(share < 0.5);
      CHECK(seconds > 5 * launch_seconds(op, facts));
      op.attributes.set("head_dim", head_dim + 1);  // of whole registers
      if (head_dim == 192) CHECK(slow_launch_seconds(op, facts) == seconds);
    }
  }
  const GpuFacts h100 = gpu("H100");
  CHECK(slow_launch_seconds(attention(4, 8192, false), h100) ==
        doctest::Approx(8 * slow_launch_seconds(attention(32, 1024, false), h100)).epsilon(0.01));  // of the pairs
}

TEST_CASE("what moves memory takes its bytes at less than the rated rate, and no launch is free") {
  const GpuFacts h100 = gpu("H100");
  auto seconds = [&](const char* kind, std::int64_t rows) {
    return launch_seconds({.kind = kind,
                           .inputs = {matrix(DType::bf16, rows, 1024)},
                           .outputs = {matrix(DType::bf16, rows, 1024)},
                           .geometry = {}},
                          h100);
  };
  const double rated = 4.0 * 65536 * 1024 / h100.device.memory_rate;
  for (const char* kind : {"add", "rms_norm", "adamw", "sum_squares", "swiglu", "rope", "another"}) {
    CAPTURE(kind);
    CHECK(seconds(kind, 65536) > rated);
    CHECK(seconds(kind, 65536) < 2 * rated);
    CHECK(seconds(kind, 1) > 1e-6);
  }
  CHECK(seconds("rms_norm_quantize", 65536) > seconds("rms_norm_quantize_delayed", 65536));
}

TEST_CASE(
    "a GEMM with an operand that is not K-major is slower where K is short, tiles pass its end or clusters are idle") {
  const GpuFacts facts = gpu("H100");
  auto longer = [&](std::int64_t m, std::int64_t n, std::int64_t k) {
    OpInstance op = product(DType::e4m3, m, n, k);
    const double straight = launch_seconds(op, facts);
    op.attributes.set("transpose_a", std::int64_t{1});
    op.inputs[0] = matrix(DType::e4m3, k, m);
    return launch_seconds(op, facts) / straight;
  };
  CHECK(longer(9728, 896, 32768) < 1.05);
  CHECK(longer(37888, 3584, 4096) == doctest::Approx(1.1).epsilon(0.01));
  CHECK(longer(1152, 896, 32768) == doctest::Approx(1.23).epsilon(0.01));  // 1,280 rows
  CHECK(longer(1536, 1536, 16384) > 1.3);                                  // 48 clusters of 66
}

TEST_CASE("a GEMM with SwiGLU in its epilogue takes longer than the GEMM, and less than the two ops") {
  const GpuFacts h100 = gpu("H100");
  constexpr std::int64_t kTokens = 32768, kWidth = 896, kGate = 4864;
  auto beside = [](OpInstance op, const char* kind, const Operand& in, std::vector<Operand> out) {
    op.kind = kind;
    if (in.present) op.inputs.push_back(in);
    op.outputs = std::move(out);
    return op;
  };
  struct Case {
    DType format;
    const char *forward, *gradient, *codes;  ///< the last: SwiGLU's own quantizing form
    double forward_seconds, gradient_seconds;
    int squares = -1;  ///< square_scales, beside block scales; without, values are transposed too
  };
  // Measured, of 24 layers: docs/performance/data/h100-0.5b-*.json; with block scales docs/performance/cuda-fp8.md.
  for (const Case& c : {Case{DType::e4m3, "matmul_swiglu_quantize_delayed", "matmul_swiglu_grad_quantize_delayed",
                             "_quantize_delayed", 12.52e-3 / 24, 12.36e-3 / 24},
                        Case{DType::e4m3, "matmul_swiglu_quantize_squares", "matmul_swiglu_grad_quantize_squares",
                             "_quantize_squares", 14.2e-3 / 24, 13.5e-3 / 24, 1},
                        Case{DType::e4m3, "matmul_swiglu_quantize_blocks", "matmul_swiglu_grad_quantize_blocks",
                             "_quantize_blocks", 16.2e-3 / 24, 18.8e-3 / 24, 0},
                        Case{DType::bf16, "matmul_swiglu", "matmul_swiglu_grad", "", 21.64e-3 / 24, 17.55e-3 / 24}}) {
    CAPTURE(c.forward);
    const Operand gate_up = matrix(DType::bf16, kTokens, 2 * kGate), made = matrix(c.format, kTokens, kGate),
                  gradient = matrix(c.format, kTokens, 2 * kGate);
    auto scaled = [&c](OpInstance op) {
      if (c.squares < 0) return op;
      op.attributes.set("scale_rows_b", std::int64_t{128});
      op.attributes.set("square_scales", std::int64_t{c.squares});
      return op;
    };
    const OpInstance up = scaled(product(c.format, kTokens, 2 * kGate, kWidth)),
                     down = scaled(product(c.format, kTokens, kGate, kWidth));
    auto codes = [&c](const Operand& made) {
      return c.squares == 0 ? std::vector<Operand>{made, made} : std::vector<Operand>{made};
    };
    auto with_gate_up = [&](std::vector<Operand> out) {
      out.push_back(gate_up);
      return out;
    };
    auto seconds = [&](const OpInstance& op) { return launch_seconds(op, h100); };
    const double forward = seconds(beside(up, c.forward, {}, with_gate_up(codes(made)))),
                 backward = seconds(beside(down, c.gradient, gate_up, codes(gradient)));
    CHECK(forward == doctest::Approx(c.forward_seconds).epsilon(0.15));
    CHECK(backward == doctest::Approx(c.gradient_seconds).epsilon(0.15));
    OpInstance swiglu{
        .kind = "swiglu" + std::string(c.codes), .inputs = {gate_up}, .outputs = codes(made), .geometry = {}};
    OpInstance swiglu_grad{.kind = "swiglu_grad" + std::string(c.codes),
                           .inputs = {matrix(DType::bf16, kTokens, kGate), gate_up},
                           .outputs = codes(gradient),
                           .geometry = {}};
    CHECK(forward > seconds(up));
    CHECK(forward < seconds(up) + seconds(swiglu));
    CHECK(backward > seconds(down));
    CHECK(backward < seconds(down) + seconds(swiglu_grad));
  }
}
