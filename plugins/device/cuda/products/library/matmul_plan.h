#pragma once
// Matmuls through cuBLASLt: descriptors built once, candidate algorithms timed once, the choice kept. cuBLASLt
// is column-major; a row-major y = op(a) op(b) is the column-major y^T = op(b)^T op(a)^T, so its A is our b and its B
// our a.

#include <cublasLt.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "quern/dtype.h"
#include "runtime/kernels.h"
#include "runtime/timed_choices.h"

namespace quern::cuda {

struct UnlistedCandidates;

/// Scratch that every matmul may use: for split-K accumulators.
inline constexpr std::size_t kMatmulWorkspace = std::size_t{64} << 20;

enum class ScaleMode : std::uint8_t {
  none,
  tensor,
  vector,        ///< one a row of a, one a column of b
  block,         ///< one for 1 x 128 elements of each, along k
  square_block,  ///< of b, for 128 x 128
};
constexpr bool of_blocks(ScaleMode scales) { return scales == ScaleMode::block || scales == ScaleMode::square_block; }

/// A matmul's shape and formats, on which the choice of an algorithm depends.
struct MatmulKey {
  std::int64_t m = 0, n = 0, k = 0;  ///< y (m, n), contracted over k
  bool transpose_a = false, transpose_b = false;
  DType a = DType::bf16, b = DType::bf16, y = DType::bf16;
  bool bias = false;  ///< (n) in y's dtype, bf16 for 8-bit operands, added in fp32
  bool accumulate = false;
  ScaleMode scales = ScaleMode::none;
  bool squares = false;            ///< of blocks: scales of 1 x 128 elements are the same for 128 rows
  bool fast_accumulation = false;  ///< 8-bit operands: may be accumulated in fewer bits
  int alignment = 256;             ///< bytes to which all operands are aligned, a power of two
  std::int64_t stride_a = 0, stride_b = 0, stride_y = 0;  ///< elements between stored rows; 0: contiguous
  float factor = 1;                                       ///< of the matmul, not of the y that it is added to
  /// Matrices of each operand, one behind the other; 0: one matrix. Of stacks no contraction is split, so that a matrix
  /// has the same bits in any stack.
  std::int64_t stack = 0;
  float beta = 0;  ///< of a matrix c that is added

  /// Whether an operand of 8 bits is not K-major: only quern's own GEMMs take it (own_matmul.h).
  bool turns() const { return size_of(a) == 1 && (transpose_a || !transpose_b); }
  std::string text() const;
  std::int64_t matrices() const { return stack > 0 ? stack : 1; }
  double flops() const {
    return 2.0 * static_cast<double>(matrices() * m) * static_cast<double>(n) * static_cast<double>(k);
  }
};

/// An algorithm as hexadecimal words, and back; none where the text is not one.
std::string text_of(const cublasLtMatmulAlgo_t& algorithm);
std::optional<cublasLtMatmulAlgo_t> algorithm_of(const std::string& text);

struct MatmulOperands {
  const void *a = nullptr, *b = nullptr, *bias = nullptr;
  const float *scale_a = nullptr, *scale_b = nullptr;
  void* y = nullptr;
  void* workspace = nullptr;  ///< kMatmulWorkspace bytes
  const void* c = nullptr;    ///< where MatmulKey::beta is not 0: another matrix of y's shape and dtype
};

/// One matmul, ready to launch. Not for several threads at once: operand pointers are part of the descriptors.
class MatmulPlan {
 public:
  explicit MatmulPlan(const MatmulKey& key);
  const MatmulKey& key() const { return key_; }
  ~MatmulPlan();
  MatmulPlan(const MatmulPlan&) = delete;
  MatmulPlan& operator=(const MatmulPlan&) = delete;

  void run(cublasLtHandle_t lt, const MatmulOperands& operands, cudaStream_t stream) const;
  cublasStatus_t try_run(cublasLtHandle_t lt, const MatmulOperands& operands, const cublasLtMatmulAlgo_t& algorithm,
                         cudaStream_t stream) const;
  /// Candidates that fit the workspace and are deterministic, best guess first.
  std::vector<cublasLtMatmulAlgo_t> candidates(cublasLtHandle_t lt, int count) const;
  /// An algorithm by its id, with everything else at its default.
  std::optional<cublasLtMatmulAlgo_t> plain(cublasLtHandle_t lt, int id) const;
  /// Whether an algorithm, perhaps from another run, can be used here.
  bool accepts(cublasLtHandle_t lt, const cublasLtMatmulAlgo_t& algorithm) const;
  void choose(const cublasLtMatmulAlgo_t& algorithm) { algorithm_ = algorithm, own_on_ = 0; }
  const cublasLtMatmulAlgo_t& algorithm() const { return algorithm_; }
  /// Own kernels on so many multiprocessors instead of the library's (own_matmul.h).
  void choose_own(int multiprocessors);
  /// The choice as text_of(algorithm), or kOwn.
  std::string choice() const;
  static constexpr const char* kOwn = "own";

 private:
  MatmulKey key_;
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, y_ = nullptr;  ///< cuBLASLt's A is our b
  cublasLtMatmulAlgo_t algorithm_ = {};
  int own_on_ = 0;  ///< multiprocessors; 0: not own
};

/// Of matmuls that the library has too: whether quern's own GEMM is taken and nothing timed, unless the run has another
/// choice. With tile scales they are faster except at sizes that hardly matter (docs/performance/cuda-fp8.md).
bool takes_own(const MatmulKey& key, const CudaTraits& gpu);

/// The source of a matmul's candidates.
enum class MatmulSearch : std::uint8_t {
  listed,  ///< the library's heuristic
  wide,    ///< besides, configurations that it does not list and own GEMMs, where they were seen to help; up to a
           ///< second a matmul
};
/// Distinguishes a matmul's choices in the file by how they were searched: equal where that makes no difference.
std::string search_mark(MatmulSearch search, const MatmulKey& key, const CudaTraits& gpu);

/// All plans of a device. Plans are shared by kernels of equal shape.
class MatmulPlans {
 public:
  /// `candidates`: that the heuristic is asked for; 1: its first is taken, and nothing is timed.
  MatmulPlans(TimedChoices& choices, int candidates, MatmulSearch search)
      : choices_(choices), candidates_(candidates), search_(candidates > 1 ? search : MatmulSearch::listed) {}

  /// Times candidates on scratch memory unless the choice is known, or is an own GEMM; null when cuBLASLt has no
  /// algorithm.
  std::shared_ptr<const MatmulPlan> make(CudaContext& context, const MatmulKey& key);

  /// Changes plans to the choices that this run goes by now. Those that cannot be used stay as they are, and are what
  /// the run goes by.
  void adopt();

 private:
  /// Has the plan run by a choice; false: it cannot.
  bool use(MatmulPlan& plan, const std::string& text) const;
  /// What a wide search tries beside the list. Of a gradient that is written by the first micro-step, and added to by
  /// others, only the best of one are tried for the other.
  UnlistedCandidates unlisted_for(const MatmulPlan& plan, const MatmulKey& key,
                                  const std::vector<cublasLtMatmulAlgo_t>& listed) const;
  /// What timing finds; none: there is no algorithm.
  std::optional<TimedChoices::Found> search(const MatmulPlan& plan, const MatmulKey& key);

  TimedChoices& choices_;
  int candidates_;
  MatmulSearch search_;
  CudaContext* context_ = nullptr;
  std::map<std::string, std::shared_ptr<MatmulPlan>> plans_;  ///< by MatmulKey::text()
  /// By the same, the best few of a wide search.
  std::map<std::string, std::vector<cublasLtMatmulAlgo_t>> finalists_;
};

}  // namespace quern::cuda
