#pragma once
// The arms of a comparison: which keys each one sets. `--vary a.b=1,2 --vary c.d=x,y` makes the four combinations, the
// first key slowest; `--arm a.b=1,c.d=x` adds one by hand. The first arm is what the others are compared with.

#include <string>
#include <string_view>
#include <vector>

namespace quern::ab {

struct Arm {
  std::string name;                    ///< its assignments, as the user wrote them
  std::string folder;                  ///< of its runs: "1-precision.id=bf16", safe as a file name
  std::vector<std::string> overrides;  ///< "a.b=value"
  bool operator==(const Arm&) const = default;
};

/// Parts between the commas that are outside brackets and quotes: `[1, 2],"a,b"` has two.
std::vector<std::string> split_values(std::string_view text);

/// Throws a config error for words that are no assignments, keys that the comparison sets itself, arms that are equal,
/// and fewer than two arms.
std::vector<Arm> make_arms(const std::vector<std::string>& vary, const std::vector<std::string>& arms);

}  // namespace quern::ab
