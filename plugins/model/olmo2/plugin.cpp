#include "olmo2.h"

QUERN_PLUGIN("model", "olmo2", manifest) { quern::decoder::add_family(manifest, quern::olmo2::family()); }
