#include "gpt2.h"

QUERN_PLUGIN("model", "gpt2", manifest) { quern::decoder::add_family(manifest, quern::gpt2::family()); }
