#pragma once
// What `quern-tools tokenize --chat` recorded beside the token files that a run trains on.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "run/session.h"

namespace quern {

struct PreparedData {
  std::vector<std::int32_t> end_tokens;               ///< that end the learned part of a conversation
  std::map<std::string, std::string> chat_templates;  ///< by name, as they were used
  std::vector<std::string> notes;                     ///< for the user
};

/// From meta.json and the templates' files in the folders of data.tokens.train: end tokens of all, and the first
/// folder's templates, with a note where another's differ. Other data, and folders without such files, record nothing.
/// An input error for a pattern that matches no file.
PreparedData prepared_data(const Session& session);

}  // namespace quern
