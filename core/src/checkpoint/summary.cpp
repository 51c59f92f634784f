#include "checkpoint/summary.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/shorten.h"
#include "checkpoint/changes.h"

namespace quern {

namespace fs = std::filesystem;

namespace {

std::string kind_of(const std::string& tensor, const TensorFiles& tensors) {
  const std::size_t slash = tensor.find('/');
  if (slash == std::string::npos) return "precision";
  const bool of_parameter = tensors.find(std::string(kMasterPrefix) + tensor.substr(slash + 1));
  return of_parameter ? tensor.substr(0, slash) : "precision";
}

}  // namespace

CheckpointSummary summary_of(const Checkpoint& checkpoint) {
  CheckpointSummary summary;
  for (const StoredTensor& tensor : checkpoint.tensors.tensors()) {
    CheckpointSummary::Kind& kind = summary.kinds[kind_of(tensor.name, checkpoint.tensors)];
    const std::string type(name_of(tensor.type));
    ++kind.tensors;
    kind.elements += tensor.count();
    kind.bytes += tensor.bytes;
    if (kind.types.find(type) == std::string::npos) kind.types += (kind.types.empty() ? "" : ", ") + type;
  }
  std::vector<std::string> own{"state.json"};
  for (std::size_t i = 0; i < checkpoint.checksums.size(); ++i) {
    const fs::path path = checkpoint.tensors.files()[i].path();
    std::error_code error;
    const std::uintmax_t bytes = fs::file_size(path, error);
    summary.files.push_back({path.filename(), error ? 0 : bytes, checkpoint.checksums[i]});
    own.push_back(path.filename());
  }
  summary.settings = settings_in(checkpoint.meta.config);
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(checkpoint.path, error)) {
    const std::string name = entry.path().filename();
    if (std::find(own.begin(), own.end(), name) == own.end()) summary.strangers.push_back(printable(name));
  }
  std::sort(summary.strangers.begin(), summary.strangers.end());
  return summary;
}

}  // namespace quern
