#include "qwen2.h"

QUERN_PLUGIN("model", "qwen2", manifest) { quern::decoder::add_family(manifest, quern::qwen2::family()); }
