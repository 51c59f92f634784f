#include "qwen3.h"

QUERN_PLUGIN("model", "qwen3", manifest) { quern::decoder::add_family(manifest, quern::qwen3::family()); }
