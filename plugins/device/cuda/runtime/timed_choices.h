#pragma once
// Choices found by timing: the algorithm of each matmul, how attention runs. JSON text for checkpoints, and a
// file in the user's cache directory. Choices hold for one GPU model and one version of the libraries; others are kept
// in the file and not touched.

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/choice_file.h"

namespace quern::cuda {

class TimedChoices {
 public:
  /// What timing gave. One that was not timed, or not at the op's own sizes, is of this run only.
  struct Found {
    std::string choice;
    bool lasting = false;
  };
  using Usable = std::function<bool(const std::string& choice)>;

  /// `cache_file`: where choices outlive the process; empty: nowhere.
  TimedChoices(const std::string& gpu, const std::string& cache_file);

  /// The choice that this run then uses: the one it has taken or loaded, whatever it was found by, or else the one that
  /// the cache file holds under `mark`, which distinguishes kinds of search. None where neither is usable.
  std::optional<std::string> known(const std::string& what, const std::string& mark, const Usable& usable);
  /// The same, or else what `time` finds, and none where it finds none. Other processes time before or after: what they
  /// found meanwhile is taken.
  std::optional<std::string> known_or_timed(const std::string& what, const std::string& mark, const Usable& usable,
                                            const std::function<std::optional<Found>()>& time);
  /// This run goes by a choice that was not timed.
  void take(const std::string& what, const std::string& choice) { taken_[what] = choice; }
  /// What this run has taken or loaded.
  std::optional<std::string> taken(const std::string& what) const;

  /// All of that.
  std::string save() const;
  /// Adds what an earlier part of this run saved, if it was on such a GPU and with these libraries; other text is
  /// ignored.
  void load(std::string_view text);

  /// In the user's cache directory; empty when there is none.
  static std::string cache_file();

 private:
  std::string owner_;  ///< "NVIDIA H100 80GB HBM3, cuBLASLt 130100, cuDNN 91900"
  ChoiceFile file_;
  ChoiceFile::Choices taken_;
  ChoiceFile::Choices filed_;  ///< from the file; names with their mark
};

}  // namespace quern::cuda
