#pragma once
// What `quern-tools tokenize --chat` recorded beside the token files that a run trains on.

#include <cstdint>
#include <string>
#include <vector>

#include "run/session.h"

namespace quern {

struct PreparedData {
  std::vector<std::int32_t> end_tokens;  ///< that end the learned part of a conversation
  std::string chat_template;             ///< as it was used; empty: none
};

/// From meta.json and chat_template.jinja in the folders of data.tokens.train: end tokens of all, and the first
/// template. Other data, and folders without such files, record nothing. An input error for a pattern that matches no
/// file.
PreparedData prepared_data(const Session& session);

}  // namespace quern
