// Fault: four mismatches at once; all must be reported.
#include "quern/plugin.h"

QUERN_PLUGIN_NOTE("sdk=98\0abi=other\0kind=model\0id=another");
