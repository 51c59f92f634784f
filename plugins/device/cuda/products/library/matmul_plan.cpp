#include "products/library/matmul_plan.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "products/library/matmul_tiles.h"
#include "products/library/matmul_timing.h"
#include "products/own/own_matmul.h"
#include "quern/error.h"
#include "runtime/check.h"
#include "runtime/hopper_kernels.h"

namespace quern::cuda {

namespace {

cudaDataType_t library_type(DType type) {
  switch (type) {
    case DType::f32: return CUDA_R_32F;
    case DType::bf16: return CUDA_R_16BF;
    case DType::e4m3: return CUDA_R_8F_E4M3;
    case DType::e5m2: return CUDA_R_8F_E5M2;
    case DType::i8: return CUDA_R_8I;
    case DType::i32: return CUDA_R_32I;
    default: fail_internal("matmul", "no GEMM for " + std::string(name_of(type)));
  }
}

struct Arithmetic {
  cublasComputeType_t sums;
  cudaDataType_t factors;
};
Arithmetic arithmetic(const MatmulKey& key) {
  return key.a == DType::i8 ? Arithmetic{CUBLAS_COMPUTE_32I, CUDA_R_32I} : Arithmetic{CUBLAS_COMPUTE_32F, CUDA_R_32F};
}

template <class T>
void set(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  QUERN_CUBLAS(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof value));
}

/// Column-major (rows, columns); `stride` from column to column, 0: contiguous.
cublasLtMatrixLayout_t make_layout(DType type, std::int64_t rows, std::int64_t columns, std::int64_t stride = 0) {
  cublasLtMatrixLayout_t layout = nullptr;
  QUERN_CUBLAS(cublasLtMatrixLayoutCreate(&layout, library_type(type), static_cast<std::uint64_t>(rows),
                                          static_cast<std::uint64_t>(columns), stride > 0 ? stride : rows));
  return layout;
}

void set_stack(cublasLtMatrixLayout_t layout, std::int64_t count, std::int64_t elements) {
  const auto matrices = static_cast<std::int32_t>(count);
  QUERN_CUBLAS(
      cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &matrices, sizeof matrices));
  QUERN_CUBLAS(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &elements,
                                                sizeof elements));
}

bool deterministic(const cublasLtMatmulAlgo_t& algorithm) {
  std::uint32_t scheme = 0;
  std::size_t written = 0;
  cublasStatus_t status = cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                                               &scheme, sizeof scheme, &written);
  return status == CUBLAS_STATUS_SUCCESS &&
         (scheme == CUBLASLT_REDUCTION_SCHEME_NONE || scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
}

constexpr std::size_t kWords = sizeof(cublasLtMatmulAlgo_t) / sizeof(std::uint64_t);

const char* text_of(ScaleMode scales) {
  switch (scales) {
    case ScaleMode::none: return "";
    case ScaleMode::tensor: return " tensor-scales";
    case ScaleMode::vector: return " vector-scales";
    case ScaleMode::block: return " block-scales";
    case ScaleMode::square_block: return " square-block-scales";
  }
  return "";
}

cublasLtMatmulMatrixScale_t library_mode(ScaleMode scales) {
  switch (scales) {
    case ScaleMode::vector: return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case ScaleMode::block: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case ScaleMode::square_block: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    default: return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  }
}

bool is_searched_widely(MatmulSearch search, const MatmulKey& key, const CudaTraits& gpu) {
  // Smaller GEMMs take some 30 us or less, of which another tile saves little, and are many in tests.
  constexpr double kLeastFlops = 2e10;
  // A configuration is checked without knowing how operands are aligned; the heuristic knows it.
  return search == MatmulSearch::wide && key.stack == 0 && gpu.compute_capability == 90 && key.flops() >= kLeastFlops &&
         key.alignment >= 256;
}

/// Whether a wide search times quern's own GEMM too. In e4m3 with one scale a tensor the winners slowed whole steps
/// down, with one a row they gained nothing (docs/performance/cuda-fp8.md).
bool tries_own(const MatmulKey& key, const CudaTraits& gpu) {
  return gpu.products == ProductChoice::automatic &&
         (key.a == DType::bf16 || (of_blocks(key.scales) && !key.squares)) && refuse_own_matmul(key, gpu).empty();
}

}  // namespace

std::string text_of(const cublasLtMatmulAlgo_t& algorithm) {
  std::uint64_t words[kWords];
  std::memcpy(words, &algorithm, sizeof words);
  std::string text;
  for (std::uint64_t word : words) {
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016" PRIx64, word);
    text += digits;
  }
  return text;
}

std::optional<cublasLtMatmulAlgo_t> algorithm_of(const std::string& text) {
  if (text.size() != 16 * kWords || text.find_first_not_of("0123456789abcdef") != std::string::npos) return {};
  std::uint64_t words[kWords];
  for (std::size_t i = 0; i < kWords; ++i) words[i] = std::stoull(text.substr(16 * i, 16), nullptr, 16);
  cublasLtMatmulAlgo_t algorithm;
  std::memcpy(&algorithm, words, sizeof words);
  return algorithm;
}

std::string MatmulKey::text() const {
  std::string text = std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) + " ";
  text += std::string(transpose_a ? "T" : "N") + (transpose_b ? "T" : "N") + " ";
  text += std::string(name_of(a)) + " " + std::string(name_of(b)) + " " + std::string(name_of(y));
  if (bias) text += " bias";
  if (accumulate) text += " add";
  text += text_of(scales);
  if (squares) text += " of-squares";
  if (fast_accumulation) text += " fast";
  if (stride_a > 0) text += " stride-a " + std::to_string(stride_a);
  if (stride_b > 0) text += " stride-b " + std::to_string(stride_b);
  if (stride_y > 0) text += " stride-y " + std::to_string(stride_y);
  if (factor != 1) text += " times " + std::to_string(factor);
  if (stack > 0) text += " stack " + std::to_string(stack);
  if (beta != 0) text += " plus " + std::to_string(beta);
  if (alignment != 256) text += " align" + std::to_string(alignment);
  return text;
}

// ---- one matmul ----

MatmulPlan::MatmulPlan(const MatmulKey& key) : key_(key) {
  const auto [sums, factors] = arithmetic(key);
  QUERN_CUBLAS(cublasLtMatmulDescCreate(&product_, sums, factors));
  set(product_, CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(product_, CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  const bool narrow = size_of(key.a) == 1;
  if (key.bias) {
    set(product_, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(product_, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, narrow ? CUDA_R_16BF : library_type(key.y));
  }
  if (key.scales == ScaleMode::vector || of_blocks(key.scales)) {
    const ScaleMode of_a = key.scales == ScaleMode::square_block ? ScaleMode::block : key.scales;
    set(product_, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, library_mode(key.scales));
    set(product_, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, library_mode(of_a));
    // No algorithm is offered for vectors of scales while their addresses are null; try_run() sets the real ones.
    const auto* anywhere = reinterpret_cast<const float*>(std::uintptr_t{256});
    set(product_, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, anywhere);
    set(product_, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, anywhere);
  }
  if (narrow && key.a != DType::i8)
    // cuBLASLt offers no fast accumulation under block scales: the permission is left unused.
    set(product_, CUBLASLT_MATMUL_DESC_FAST_ACCUM,
        static_cast<std::int8_t>(key.fast_accumulation && !of_blocks(key.scales)));
  // A row-major (R, C) is a column-major (C, R).
  a_ =
      key.transpose_b ? make_layout(key.b, key.k, key.n, key.stride_b) : make_layout(key.b, key.n, key.k, key.stride_b);
  b_ =
      key.transpose_a ? make_layout(key.a, key.m, key.k, key.stride_a) : make_layout(key.a, key.k, key.m, key.stride_a);
  y_ = make_layout(key.y, key.n, key.m, key.stride_y);
  if (key.stack == 0) return;
  set_stack(a_, key.stack, key.k * key.n);
  set_stack(b_, key.stack, key.m * key.k);
  set_stack(y_, key.stack, key.m * key.n);
}

MatmulPlan::~MatmulPlan() {
  if (a_ != nullptr) cublasLtMatrixLayoutDestroy(a_);
  if (b_ != nullptr) cublasLtMatrixLayoutDestroy(b_);
  if (y_ != nullptr) cublasLtMatrixLayoutDestroy(y_);
  if (product_ != nullptr) cublasLtMatmulDescDestroy(product_);
}

cublasStatus_t MatmulPlan::try_run(cublasLtHandle_t lt, const MatmulOperands& operands,
                                   const cublasLtMatmulAlgo_t& algorithm, cudaStream_t stream) const {
  if (key_.bias) set(product_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
  if (key_.scales != ScaleMode::none) {
    set(product_, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.scale_b);
    set(product_, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.scale_a);
  }
  auto multiply = [&](auto one) {
    const auto factor = static_cast<decltype(one)>(key_.factor);
    const auto beta = key_.accumulate ? one : static_cast<decltype(one)>(key_.beta);
    const void* c = key_.beta != 0 ? operands.c : operands.y;
    return cublasLtMatmul(lt, product_, &factor, operands.b, a_, operands.a, b_, &beta, c, y_, operands.y, y_,
                          &algorithm, operands.workspace, kMatmulWorkspace, stream);
  };
  return key_.a == DType::i8 ? multiply(std::int32_t{1}) : multiply(1.0f);
}

void MatmulPlan::choose_own(int multiprocessors) {
  hopper_kernels().load_own_matmul(key_);
  own_on_ = multiprocessors;
}

std::string MatmulPlan::choice() const { return own_on_ > 0 ? kOwn : text_of(algorithm_); }

void MatmulPlan::run(cublasLtHandle_t lt, const MatmulOperands& operands, cudaStream_t stream) const {
  if (own_on_ > 0) return hopper_kernels().run_own_matmul(key_, operands, own_on_, stream);
  QUERN_CUBLAS(try_run(lt, operands, algorithm_, stream));
}

std::vector<cublasLtMatmulAlgo_t> MatmulPlan::candidates(cublasLtHandle_t lt, int count) const {
  cublasLtMatmulPreference_t preference = nullptr;
  QUERN_CUBLAS(cublasLtMatmulPreferenceCreate(&preference));
  auto prefer = [preference](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    QUERN_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{kMatmulWorkspace});
  // Parts of split-K are summed in fp32 from the workspace in fixed order: no atomics, no rounding between.
  const auto reduction = key_.stack > 0 ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(reduction));
  for (auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                         CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    prefer(attribute, static_cast<std::uint32_t>(key_.alignment));
  }
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<std::size_t>(count));
  int found = 0;
  cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(lt, product_, a_, b_, y_, y_, preference, count, results.data(), &found);
  cublasLtMatmulPreferenceDestroy(preference);
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  if (status != CUBLAS_STATUS_SUCCESS) return algorithms;
  results.resize(static_cast<std::size_t>(found));
  for (const cublasLtMatmulHeuristicResult_t& result : results) {
    if (result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= kMatmulWorkspace && deterministic(result.algo))
      algorithms.push_back(result.algo);
  }
  return algorithms;
}

std::optional<cublasLtMatmulAlgo_t> MatmulPlan::plain(cublasLtHandle_t lt, int id) const {
  cublasLtMatmulAlgo_t algorithm = {};
  const cudaDataType_t y = library_type(key_.y);
  const auto [sums, factors] = arithmetic(key_);
  const cublasStatus_t status =
      cublasLtMatmulAlgoInit(lt, sums, factors, library_type(key_.b), library_type(key_.a), y, y, id, &algorithm);
  return status == CUBLAS_STATUS_SUCCESS ? std::optional(algorithm) : std::nullopt;
}

bool MatmulPlan::accepts(cublasLtHandle_t lt, const cublasLtMatmulAlgo_t& algorithm) const {
  cublasLtMatmulHeuristicResult_t result = {};
  return cublasLtMatmulAlgoCheck(lt, product_, a_, b_, y_, y_, &algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
         result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= kMatmulWorkspace && deterministic(algorithm);
}

// ---- all matmuls ----

bool takes_own(const MatmulKey& key, const CudaTraits& gpu) {
  return (gpu.products == ProductChoice::own || (gpu.products == ProductChoice::automatic && key.squares)) &&
         refuse_own_matmul(key, gpu).empty();
}

std::string search_mark(MatmulSearch search, const MatmulKey& key, const CudaTraits& gpu) {
  if (!is_searched_widely(search, key, gpu)) return "";
  return tries_own(key, gpu) ? ", wide, own" : ", wide";
}

std::shared_ptr<const MatmulPlan> MatmulPlans::make(CudaContext& context, const MatmulKey& key) {
  const std::string name = key.text();
  if (auto it = plans_.find(name); it != plans_.end()) return it->second;
  context_ = &context;
  auto plan = std::make_shared<MatmulPlan>(key);
  if (key.turns()) {
    plan->choose_own(context.multiprocessors);
    return plans_[name] = plan;
  }
  auto usable = [&](const std::string& text) { return use(*plan, text); };
  std::optional<std::string> found;
  if (takes_own(key, context.traits)) {
    found = choices_.taken(name);
    if (!found || !usable(*found)) found = MatmulPlan::kOwn, choices_.take(name, *found);
  } else {
    found = choices_.known_or_timed(name, search_mark(search_, key, context.traits), usable,
                                    [&] { return search(*plan, key); });
  }
  if (!found) return nullptr;
  use(*plan, *found);
  plans_[name] = plan;
  return plan;
}

std::optional<TimedChoices::Found> MatmulPlans::search(const MatmulPlan& plan, const MatmulKey& key) {
  const bool wide = is_searched_widely(search_, key, context_->traits);
  const std::vector<cublasLtMatmulAlgo_t> listed = plan.candidates(context_->lt, candidates_);
  if (listed.empty()) return std::nullopt;
  if (candidates_ == 1) return TimedChoices::Found{text_of(listed.front()), false};
  UnlistedCandidates unlisted;
  if (wide) unlisted = unlisted_for(plan, key, listed);
  const bool own = wide && tries_own(key, context_->traits);
  const TimedChoice choice = choose_by_time(*context_, key, listed, unlisted, own);
  if (wide && choice.whole) finalists_[key.text()] = choice.finalists;
  return TimedChoices::Found{choice.own ? MatmulPlan::kOwn : text_of(choice.algorithm), choice.whole};
}

UnlistedCandidates MatmulPlans::unlisted_for(const MatmulPlan& plan, const MatmulKey& key,
                                             const std::vector<cublasLtMatmulAlgo_t>& listed) const {
  MatmulKey other = key;
  other.accumulate = !key.accumulate;
  if (const auto searched = finalists_.find(other.text()); searched != finalists_.end())
    return {.first = searched->second, .rest = {}};
  return unlisted_candidates(context_->lt, plan, key, listed, context_->traits.multiprocessors);
}

bool MatmulPlans::use(MatmulPlan& plan, const std::string& text) const {
  if (text == MatmulPlan::kOwn) {
    if (!refuse_own_matmul(plan.key(), context_->traits).empty()) return false;
    plan.choose_own(context_->multiprocessors);
    return true;
  }
  const std::optional<cublasLtMatmulAlgo_t> algorithm = algorithm_of(text);
  if (!algorithm || !plan.accepts(context_->lt, *algorithm)) return false;
  plan.choose(*algorithm);
  return true;
}

void MatmulPlans::adopt() {
  for (auto& [name, plan] : plans_)
    if (const auto taken = choices_.taken(name); taken && !use(*plan, *taken)) choices_.take(name, plan->choice());
}

}  // namespace quern::cuda
