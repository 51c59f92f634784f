#pragma once
// A checkpoint as people and scripts look at it: what its state.json and the headers of its files say.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace quern {

struct CheckpointSummary {
  struct Kind {
    std::int64_t tensors = 0, elements = 0;
    std::uint64_t bytes = 0;
    std::string types = {};  ///< "F32", or several with ", " between
  };
  struct File {
    std::string name;
    std::uint64_t bytes = 0;
    std::string checksum;
  };
  std::map<std::string, Kind> kinds;            ///< "master", "moment1", ..., and "precision" for states of its backend
  std::vector<File> files;                      ///< of tensors, by rank
  std::map<std::string, std::string> settings;  ///< of the config, by key: "model.id"; empty where it cannot be read
  std::vector<std::string> strangers;           ///< files in the directory that are not the checkpoint's
};

CheckpointSummary summary_of(const Checkpoint& checkpoint);

}  // namespace quern
