#pragma once
// Raw safetensors files, and checkpoints whose state is changed, for the tests of this folder, of hf and of tools.

#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>

#include <nlohmann/json.hpp>

#include "base/checksum.h"
#include "base/files/test_directory.h"

namespace quern {

/// A safetensors file as bytes, from any header text.
inline std::string raw_safetensors(const std::string& header, std::size_t data_bytes) {
  std::uint64_t length = header.size();
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  return text + header + std::string(data_bytes, '\0');
}

/// Changes state.json, and its checksum to the one that it then has.
inline void change_state(const std::string& checkpoint, const std::function<void(nlohmann::json&)>& change) {
  const std::string path = checkpoint + "/state.json";
  nlohmann::json state = nlohmann::json::parse(read_text(path));
  change(state);
  state.erase("xxh3");
  const std::string text = state.dump();
  state["xxh3"] = checksum_text(checksum_of(std::as_bytes(std::span(text))));
  write_text(path, state.dump());
}

}  // namespace quern
