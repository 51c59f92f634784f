#pragma once
// Paths as a config has them: "~" that no shell has read, and names of models in the cache of the Hugging Face hub.

#include <string>

namespace quern {

/// "~" and "~/a" with the home directory of this user, "~name" and "~name/a" with another's, as a shell reads
/// them. Any other text, and one whose user or home is unknown, is returned as it is.
std::string expand_home(const std::string& path);

/// The folder of "Qwen/Qwen2.5-0.5B" in the hub's cache ($HF_HUB_CACHE, $HF_HOME/hub, ~/.cache/huggingface/hub): its
/// newest download. Any other text, and one that is a path or is not in the cache, is returned as it is.
std::string cached_model(const std::string& name);

}  // namespace quern
