#pragma once
// What a check found: one line a contract, with got and want where it is broken. A contract's body throws what it
// finds; anything else that escapes from a plugin is a broken contract too.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "quern/error.h"

namespace quern::conformance {

enum class Verdict { holds, broken, skipped };

struct Finding {
  std::string subject;   ///< "model \"llama\""; the same for all contracts of one implementation
  std::string contract;  ///< a few words, unique in its subject
  Verdict verdict = Verdict::holds;
  std::string detail;  ///< a figure that was seen; for broken ones, what, got and want; for skipped ones, why
};

/// Thrown by a contract's body.
struct Broken {
  std::string what, got, want;
};
struct Skipped {
  std::string reason;
};
/// What a line of the table starts with, and what it ends with.
std::string line_start(const std::string& contract);
std::string line_end(const Finding& finding);
[[noreturn]] void broken(std::string what, std::string got, std::string want);
/// Throws Broken unless `holds`.
void need(bool holds, const std::string& what, const std::string& got, const std::string& want);
/// Runs `action`, which has to be refused by an Error of `code` that says something, and returns what it says.
std::string need_refusal(const std::string& what, ErrorCode code, const std::function<void()>& action);
std::string number(double value);

/// Hears of each contract before it runs and after, so that a plugin which ends the process leaves its name.
class Progress {
 public:
  virtual ~Progress() = default;
  virtual void began(const std::string& subject, const std::string& contract) = 0;
  virtual void ended(const Finding& finding) = 0;
};

class Report {
 public:
  /// `progress` outlives the report; null: nobody listens. `only`: parts of contracts' names; empty: all contracts.
  explicit Report(Progress* progress = nullptr, std::vector<std::string> only = {})
      : progress_(progress), only_(std::move(only)) {}
  /// Names what the contracts that follow are about.
  void begin(std::string subject) { subject_ = std::move(subject); }
  /// Runs the body, which returns the detail of a contract that holds. Returns whether it holds.
  /// One that `only` does not name is left out, and counts as if it held.
  bool contract(const std::string& name, const std::function<std::string()>& body);
  /// A contract that others need: it runs whatever `only` names.
  bool needed(const std::string& name, const std::function<std::string()>& body);
  /// Says that the kit knows no contract of this kind.
  void no_contracts(const std::string& kind);

  const std::vector<Finding>& findings() const { return findings_; }
  int count(Verdict verdict) const;
  /// A config error where no contract has one of the names of `only` in its own.
  void need_all_named() const;
  /// 0: all hold. Else the code of an Error: config when the plugin cannot be loaded, internal when a contract is
  /// broken, resources when none is and some were skipped, for the hardware is not here or the kit knows none.
  int exit_code() const;
  /// Says that what is wrong is the file or the choice, not a contract behind it.
  void refuse() { refused_ = true; }
  /// The table, and a last line with counts.
  std::string text() const;
  std::string counts() const;

 private:
  void add(Finding finding);

  Progress* progress_;
  std::vector<std::string> only_;
  std::vector<std::string> left_out_;  ///< names
  std::string subject_;
  std::vector<Finding> findings_;
  bool refused_ = false;
};

}  // namespace quern::conformance
