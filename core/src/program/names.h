#pragma once
// What values and tensors are called that programs, the plan, the engine and the trainer all know.

#include <compare>
#include <string>

namespace quern {

/// What a tensor that outlasts programs is known by.
struct TensorId {
  static constexpr int kWhole = -1;  ///< as far as this rank has it
  static constexpr int kOwn = -2;    ///< this rank's rows of what ranks split; of all else the whole
  std::string kind = {};             ///< below, an optimizer state's, or a value's name
  std::string parameter = {};        ///< empty for runtime values and scalars
  int layer = -1;                    ///< -1 outside the layers
  int part = kWhole;                 ///< or kOwn, or the number of a piece of a gradient, of an element of slice amaxes
  auto operator<=>(const TensorId&) const = default;
};
/// For people: "gradient.qkv.weight.3 piece 5".
inline std::string text_of(const TensorId& id) {
  std::string text = id.kind;
  if (!id.parameter.empty()) text += "." + id.parameter;
  if (id.layer >= 0) text += "." + std::to_string(id.layer);
  return id.part < 0 ? text : text + " piece " + std::to_string(id.part);
}

namespace names {

// ---- runtime values of a micro-batch ----
inline constexpr char kTokens[] = "tokens";
inline constexpr char kTargets[] = "targets";
inline constexpr char kPositions[] = "positions";
inline constexpr char kDocuments[] = "documents";
inline constexpr char kRows[] = "rows";  ///< of the tokens whose next logits are wanted
inline constexpr char kStep[] = "step";  ///< StepState

// ---- state of a step ----
inline constexpr char kLossStats[] = "loss_stats";        ///< LossStats
inline constexpr char kEvalStats[] = "eval_stats";        ///< the same of an evaluation
inline constexpr char kSquares[] = "squares";             ///< sums of squares of a layer's gradients, f64
inline constexpr char kWholeSquares[] = "squares.whole";  ///< of gradients that every rank has whole
inline constexpr char kShardSquares[] =
    "squares.shards";                                 ///< of all shards; kOwn: a layer's, which are neighbours in it
inline constexpr char kOwnSquares[] = "squares.own";  ///< this rank's part of kShardSquares, where it is gathered
inline constexpr char kUpdate[] = "update";           ///< UpdateState
inline constexpr char kUpdateStep[] = "update_step";  ///< StepState of a deferred update
inline constexpr char kAmaxes[] = "amaxes";           ///< of masters that are split over ranks, one element each

// ---- results ----
inline constexpr char kLogits[] = "logits";
inline constexpr char kNextLogits[] = "next_logits";

// ---- kinds of a parameter's tensors; kinds of optimizer states are the optimizer's ----
inline constexpr char kMaster[] = "master";
inline constexpr char kMasterScale[] = "master_scale";  ///< of rows of a master in int8
inline constexpr char kWorking[] = "working";
inline constexpr char kGradient[] = "gradient";
inline constexpr char kPartials[] =
    "partials";  ///< sums of some micro-batches, a power of two each; of losses without a parameter
inline constexpr char kStaged[] = "staged";             ///< what all ranks have of a sum
inline constexpr char kAmax[] = "amax";                 ///< of all ranks' rows, an element of kAmaxes, or of all slices
inline constexpr char kSliceAmaxes[] = "slice_amaxes";  ///< of the slices in which the master is updated

// ---- attributes ----
/// Of a linear of few outputs: its input's gradient is added to the others in place.
inline constexpr char kLowRank[] = "low_rank";

}  // namespace names

}  // namespace quern
