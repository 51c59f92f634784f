#include <cublasLt.h>

#include <chrono>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "bench.h"
#include "loss/cross_entropy.h"
#include "products/library/matmul_plan.h"
#include "products/library/matmul_scratch.h"
#include "products/library/matmul_tiles.h"
#include "products/library/matmul_timing.h"
#include "runtime/check.h"

namespace quern::cuda::bench {

namespace {

/// Shapes of Qwen2.5 at a micro-batch of `batch` sequences of 1024.
ModelShape qwen(const std::string& size, std::int64_t batch) {
  const Geometry geometry{batch, 1024};
  if (size == "0.5B") return {size, geometry, 24, 896, 4864, 14, 2, 64, 151936};
  if (size == "1.5B") return {size, geometry, 28, 1536, 8960, 12, 2, 128, 151936};
  if (size == "3B") return {size, geometry, 36, 2048, 11008, 16, 2, 128, 151936};
  return {"7B", geometry, 28, 3584, 18944, 28, 4, 128, 152064};
}

double teraflops(double flops, double milliseconds) { return flops / milliseconds * 1e-9; }

/// Logits of a chunk to loss and gradient, in place; milliseconds a chunk.
double cross_entropy_ms(Bench& bench, const ModelShape& m, std::int64_t rows) {
  const std::int64_t stride = logit_stride(m.vocabulary, DType::bf16);
  const auto logit_bytes = static_cast<std::size_t>(rows * stride) * 2, row_bytes = static_cast<std::size_t>(rows) * 4;
  Memory logits(bench.device(), logit_bytes), targets(bench.device(), row_bytes), losses(bench.device(), row_bytes);
  const auto stream = static_cast<cudaStream_t>(bench.stream().handle);
  fill_random(logits.data(), logit_bytes, DType::bf16, 1, stream);
  bench.device().fill(targets.data(), 0, row_bytes, bench.stream());
  const CrossEntropy plan = make_cross_entropy(DType::bf16, m.vocabulary, true, DType::f32, 0, CudaTraits{});
  return bench.median_ms(1, [&](int) {
    cross_entropy(plan, logits.data(), nullptr, reinterpret_cast<const std::int32_t*>(targets.data()),
                  reinterpret_cast<float*>(losses.data()), rows, stream);
  });
}

constexpr int kCandidates = 32;  ///< more than the library has ever offered

/// Times a matmul's candidates.
class Timing {
 public:
  Timing() {
    context_.traits = facts_of_unit(0).cuda;
    QUERN_CUBLAS(cublasLtCreate(&context_.lt));
    QUERN_CUDA(cudaStreamCreateWithFlags(&context_.setup, cudaStreamNonBlocking));
  }
  ~Timing() {
    cudaStreamDestroy(context_.setup);
    cublasLtDestroy(context_.lt);
  }
  Timing(const Timing&) = delete;
  Timing& operator=(const Timing&) = delete;

  /// As a device would.
  TimedChoice choose(const MatmulKey& key) {
    const MatmulPlan plan(key);
    const std::vector<cublasLtMatmulAlgo_t> listed = plan.candidates(context_.lt, kCandidates);
    if (listed.empty()) return {};
    UnlistedCandidates unlisted;
    if (!search_mark(MatmulSearch::wide, key, context_.traits).empty())
      unlisted = unlisted_candidates(context_.lt, plan, key, listed, context_.traits.multiprocessors);
    return choose_by_time(context_, key, listed, unlisted, false);
  }

 private:
  CudaContext context_;
};

void print_product(Timing& timing, const ModelShape& m, const char* name, std::int64_t out, std::int64_t in) {
  const std::int64_t n = m.geometry.tokens();
  const double flops = 2.0 * static_cast<double>(n) * static_cast<double>(out) * static_cast<double>(in);
  std::printf("%-5s %5lld %-5s", m.name.c_str(), static_cast<long long>(n), name);
  MatmulKey forward, input, weight;
  forward.m = n, forward.n = out, forward.k = in, forward.transpose_b = true;
  input.m = n, input.n = in, input.k = out;
  weight.m = out, weight.n = in, weight.k = n, weight.transpose_a = weight.accumulate = true;
  for (const MatmulKey& key : {forward, input, weight}) {
    const TimedChoice choice = timing.choose(key);
    std::printf("   %4.0f %4.0f %-14s (%3zu)", teraflops(flops, choice.listed_ms), teraflops(flops, choice.ms),
                configuration_text(choice.algorithm).c_str(), choice.tried);
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

void print_attention(Bench& bench) {
  const std::int64_t chunks[] = {0, 1, 2, 4, 8, 16, 32};
  std::printf("attention, causal, T 1024, TFLOP/s     forward   backward, auto or in cuDNN's chunks of");
  for (std::int64_t chunk : chunks)
    chunk == 0 ? std::printf("  auto") : std::printf(" %5lld", static_cast<long long>(chunk));
  std::printf(" sequences\n");
  for (const auto& [size, batch] : {std::pair{"0.5B", 32}, {"1.5B", 16}, {"7B", 4}, {"7B", 8}}) {
    const ModelShape m = qwen(size, batch);
    const Case forward = attention_case(m, false, 0);
    std::printf("head %3lld, %2lld/%lld heads, batch %2d %17.0f %23s", static_cast<long long>(m.head_dim),
                static_cast<long long>(m.heads), static_cast<long long>(m.kv_heads), batch,
                teraflops(forward.flops, bench.run(forward)), "");
    for (std::int64_t chunk : chunks) {
      if (chunk > batch) break;
      const Case backward = attention_case(m, true, chunk);
      std::printf(" %5.0f", teraflops(backward.flops, bench.run(backward)));
      std::fflush(stdout);
    }
    std::printf("\n");
  }
  const auto state = nlohmann::json::parse(bench.device().save_state());
  for (const auto& choices : state)
    for (const auto& [what, choice] : choices.items())
      if (what.starts_with("attention") && what.find(" chunk ") == what.npos)  // not what the table's chunks took
        std::printf("%s: sequences at once, place and name of the plan: %s\n", what.c_str(),
                    choice.get<std::string>().c_str());
}

void print_loss(Bench& bench) {
  std::printf(
      "LM head and loss, ms for all tokens           chunk   whole TFLOP/s  logits   cross-entropy GB/s"
      "      dx dweight\n");
  for (const auto& [size, batch] : {std::pair{"0.5B", 32}, {"1.5B", 16}, {"7B", 4}}) {
    const ModelShape m = qwen(size, batch);
    const std::int64_t tokens = m.geometry.tokens();
    for (std::int64_t chunk : {0, 1024, 2048, 4096, 8192}) {
      if (chunk > tokens) break;
      const Case all = loss_case(m, chunk, true, true);
      const double whole = bench.run(all);
      std::printf("M %5lld, V %lld, K %4lld %13s %7s %7.2f %7.0f", static_cast<long long>(tokens),
                  static_cast<long long>(m.vocabulary), static_cast<long long>(m.width), "",
                  chunk == 0 ? "auto" : std::to_string(chunk).c_str(), whole, teraflops(all.flops, whole));
      if (chunk > 0) {  // a gradient's time is what leaving it out saves
        const double chunks = static_cast<double>(tokens) / static_cast<double>(chunk);
        const double dx = whole - bench.run(loss_case(m, chunk, false, true));
        const double dweight = whole - bench.run(loss_case(m, chunk, true, false));
        const double entropy = chunks * cross_entropy_ms(bench, m, chunk);
        const double rate = 4e-6 * static_cast<double>(tokens) * static_cast<double>(m.vocabulary) / entropy;
        std::printf(" %7.2f %15.2f %4.0f %7.2f %7.2f", whole - dx - dweight - entropy, entropy, rate, dx, dweight);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}

void print_products(Bench&) {
  Timing timing;
  std::size_t free_before = 0, free_after = 0, total = 0;
  QUERN_CUDA(cudaMemGetInfo(&free_before, &total));
  const auto start = std::chrono::steady_clock::now();
  int count = 0;
  std::printf(
      "matmuls, TFLOP/s under sustained load: the best that the library lists, the best found, its tile, cluster and "
      "variant (of how many)\n%-17s   %-30s   %-30s   %s\n",
      "model tokens", "output", "input gradient", "weight gradient, added in bf16");
  for (const auto& [size, batch] : {std::pair{"0.5B", 32}, {"1.5B", 32}, {"3B", 16}, {"7B", 4}, {"7B", 16}}) {
    const ModelShape m = qwen(size, batch);
    print_product(timing, m, "qkv", m.qkv(), m.width);
    print_product(timing, m, "o", m.width, m.heads * m.head_dim);
    print_product(timing, m, "up", 2 * m.ffn, m.width);
    print_product(timing, m, "down", m.width, m.ffn);
    count += 12;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  QUERN_CUDA(cudaMemGetInfo(&free_after, &total));
  std::printf("%.1f s a matmul; kernels loaded meanwhile take %.0f MiB of device memory\n", seconds.count() / count,
              (static_cast<double>(free_before) - static_cast<double>(free_after)) / (1 << 20));
}

}  // namespace quern::cuda::bench
