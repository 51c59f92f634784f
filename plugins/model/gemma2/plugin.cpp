#include "gemma2.h"

QUERN_PLUGIN("model", "gemma2", manifest) { quern::decoder::add_family(manifest, quern::gemma2::family()); }
