#pragma once
// What the ranks of one machine tell each other of faults: a page of text for each, in a file that all map. Nobody
// waits for it, so that a rank which comes late still finds why the others have gone.

#include <optional>
#include <string>

namespace quern::nccl {

class FaultPage {
 public:
  /// `path`: one for all ranks, in a folder that is there; the file may be removed once all are here. Throws a
  /// resources error.
  FaultPage(const std::string& path, int rank, int size);
  ~FaultPage();
  FaultPage(const FaultPage&) = delete;
  FaultPage& operator=(const FaultPage&) = delete;

  /// From any thread; the first text stays.
  void tell(const std::string& text) noexcept;
  /// What another rank told.
  std::optional<std::string> told() const;

 private:
  struct Seat;
  const int rank_, size_;
  Seat* seats_ = nullptr;  // by rank
};

}  // namespace quern::nccl
