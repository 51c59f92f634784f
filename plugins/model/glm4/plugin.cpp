#include "glm4.h"

QUERN_PLUGIN("model", "glm4", manifest) { quern::decoder::add_family(manifest, quern::glm4::family()); }
