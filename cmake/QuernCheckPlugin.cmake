# quern_check_plugin(<target> [SET key=value...]): a ctest test that runs the conformance kit on a plugin's library
# (docs/conformance.md). SET gives options of the plugin, for those that the kit has no value for. A plugin whose
# hardware is not here is reported as skipped, after the contracts that need none.
function(quern_check_plugin target)
  cmake_parse_arguments(arg "" "" "SET" ${ARGN})
  set(settings)
  foreach(setting ${arg_SET})
    list(APPEND settings --set ${setting})
  endforeach()
  add_test(NAME conformance.${target} COMMAND quern::cli plugins check $<TARGET_FILE:${target}> ${settings})
  set_tests_properties(conformance.${target} PROPERTIES SKIP_RETURN_CODE 4 TIMEOUT 600 LABELS conformance)
endfunction()
