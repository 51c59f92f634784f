#pragma once
// What was found by timing: the algorithm of each matrix product, how attention runs. JSON text for checkpoints and for
// a file in the user's cache directory. Choices hold for one GPU model and one version of the libraries; others are
// kept in the file and left alone.

#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace quern::cuda {

class TimedChoices {
 public:
  /// `cache_file`: where choices outlive the process; empty: nowhere. A missing or bad file is an empty one.
  TimedChoices(const std::string& gpu, std::string cache_file);

  /// What this run has taken or loaded, whatever it was found by; or else what the cache file holds under `mark`, which
  /// tells kinds of search apart.
  std::optional<std::string> find(const std::string& what, const std::string& mark = {}) const;
  /// This run takes a known choice, or a guess; `measure` takes a new one, which also goes to the cache file.
  void take(const std::string& what, const std::string& choice);
  void measure(const std::string& what, const std::string& choice, const std::string& mark = {});

  /// What this run has taken or loaded.
  std::string save() const;
  /// Adds what an earlier part of this run saved, if it was on such a GPU and with these libraries; other text is
  /// ignored.
  void load(std::string_view text);

  /// In the user's cache directory; empty when there is none.
  static std::string cache_file();

 private:
  using Choices = std::map<std::string, std::string>;
  Choices mine(std::string_view text) const;
  void write_file() const noexcept;

  std::string owner_;  ///< "NVIDIA H100 80GB HBM3, cuBLASLt 130100, cuDNN 91900"
  std::string cache_file_;
  Choices taken_;
  Choices known_, measured_;  ///< from the file, and by this process; names with their mark
};

}  // namespace quern::cuda
