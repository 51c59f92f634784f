#pragma once
// Where the values of a program are when it runs at a stop of the order, and which value is which: the streams between
// programs, what layers keep, and tensors are known by their place; a program's local values are new at every stop.

#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "plan/schedule/run_memory.h"

namespace quern {

class Places {
 public:
  /// Both outlive this. Names of values are added to `names`.
  Places(const Plan& plan, std::vector<std::string>& names);

  /// The run whose stops come next, after run_memory.
  void begin(RunMemory memory) { memory_ = std::move(memory); }
  /// All values of the stop's program; absent places for those that have none.
  std::vector<Access> of(const Stop& stop);
  Access tensor(const PlannedTensor& tensor);

  /// A stream that a store keeps for the backward pass: where the forward pass has it, and in the store.
  struct KeptStream {
    Access here, home;
  };
  std::vector<KeptStream> kept_streams(const Stop& stop);

 private:
  Access of_value(const Stop& stop, ValueId id);
  Access boundary(const Stop& stop, const Value& value, int in, int out);
  Access stream(const Stop& stop, const StreamId& stream, std::int64_t bytes);
  /// Where the run has it, kept or not.
  Access passing(const Stop& stop, const StreamId& stream, std::int64_t bytes);
  Access saved(const Stop& stop, const Value& value);
  Access state(const Stop& stop, const Value& value);
  /// The permanent value at a place.
  Access at(const Place& place, std::int64_t known_by, std::string_view name, int layer);
  std::int32_t fresh(std::string name);
  /// A tensor of a parameter, or the rows of it that the stop is for.
  Access of_rows(const Stop& stop, const PlannedTensor& tensor, const Value& value);

  const Plan& plan_;
  std::vector<std::string>& names_;
  std::unordered_map<std::string, bool> in_blocks_;  ///< by parameter
  std::map<std::tuple<Space, std::int32_t, std::int64_t>, std::int32_t> settled_;
  std::map<std::pair<std::size_t, bool>, std::int32_t> passing_;  ///< by stream's number, and whether evaluated
  std::map<TensorId, std::int32_t> loading_;
  RunMemory memory_;
};

}  // namespace quern
