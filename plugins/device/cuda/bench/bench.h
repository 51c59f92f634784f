#pragma once
// Timing ops at the sizes of real models, through the Device interface, as training launches them: captured, and with
// operands that rotate through more memory than the L2 cache holds.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/cuda_device.h"

namespace quern::cuda::bench {

enum class Fill { normal, positive, positions, tokens, update, step, scale_state };

struct BenchOperand {
  Operand operand;
  Fill fill = Fill::normal;
  std::int64_t limit = 0;  ///< positions and tokens are below it
};

struct Case {
  std::string label, kind;
  std::vector<BenchOperand> inputs;
  std::vector<Operand> outputs;
  Attributes attributes = {};
  Geometry geometry = {};
  double flops = 0;                                ///< 0: a case of bytes
  std::vector<std::pair<int, int>> in_place = {};  ///< output, input
};

inline Operand operand(DType dtype, Extents extents, bool accumulate = false) {
  return {dtype, std::move(extents), true, accumulate};
}
inline BenchOperand normal(DType dtype, Extents extents) { return {operand(dtype, std::move(extents))}; }

/// Shapes of one model; heads as attention sees them.
struct ModelShape {
  std::string name;
  Geometry geometry;
  std::int64_t layers, width, ffn, heads, kv_heads, head_dim, vocabulary;
  std::int64_t qkv() const { return (heads + 2 * kv_heads) * head_dim; }
};

/// Every op at the sizes of a small and of a large model.
std::vector<Case> all_cases();
/// Cases of the 8-bit formats at one model's sizes.
void add_code_cases(std::vector<Case>& cases, const ModelShape& model);
/// Causal attention, forward or backward; by cuDNN, `chunk` sequences at once, or for 0 as the device likes.
Case attention_case(const ModelShape& model, bool backward, std::int64_t chunk);
/// lm_loss_train in chunks of `chunk` tokens, with the gradients asked for.
Case loss_case(const ModelShape& model, std::int64_t chunk, bool input_gradient, bool weight_gradient);

/// As a perfect kernel would move them: every operand once, a sum into a gradient twice, of an embedding the rows used.
double bytes_of(const Case& c);

/// Device memory that is given back.
class Memory {
 public:
  Memory(CudaDevice& device, std::size_t bytes, MemoryKind kind = MemoryKind::device)
      : device_(device), kind_(kind), data_(static_cast<std::byte*>(device.allocate(kind, bytes))) {}
  ~Memory() { device_.release(kind_, data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return data_; }

 private:
  CudaDevice& device_;
  MemoryKind kind_;
  std::byte* data_;
};

class Bench {
 public:
  explicit Bench(CudaDevice& device);

  /// Milliseconds of one launch.
  double run(const Case& c);
  /// Milliseconds of one body(i), the median over samples of captured runs; i counts up.
  double median_ms(int least_launches, const std::function<void(int)>& body);
  CudaDevice& device() { return device_; }
  Stream stream() const { return stream_; }

 private:
  /// Adds the views of one set of operands, and fills its inputs.
  void bind(const Case& c, std::byte* memory, std::vector<std::vector<View>>& inputs,
            std::vector<std::vector<View>>& outputs);
  void fill(const BenchOperand& input, const View& view);
  void write_pattern(const BenchOperand& input, DType dtype, std::size_t count);

  CudaDevice& device_;
  Stream stream_;
  Memory pattern_;
  std::vector<Event> events_;
  std::string written_;  ///< what the pattern holds
};

// ---- tables: each prints itself ----

void print_attention(Bench& bench);
void print_loss(Bench& bench);
void print_products(Bench& bench);

}  // namespace quern::cuda::bench
