#include "llama.h"

QUERN_PLUGIN("model", "llama", manifest) { quern::decoder::add_family(manifest, quern::llama::family()); }
