# quern_check_plugin(<target> [SET key=value...]): a ctest test that runs the conformance kit on a plugin's library
# (docs/conformance.md). SET gives options of the plugin, for those that the kit has no value for. A plugin whose
# hardware is not here is reported as skipped, after the contracts that need none.
function(quern_check_plugin target)
  cmake_parse_arguments(arg "" "" "SET" ${ARGN})
  if(TARGET quern_cli)
    set(program $<TARGET_FILE:quern_cli>)
  else()
    # From an installed quern: this file is in lib/cmake/quern, the program in bin.
    find_program(QUERN_PROGRAM quern HINTS ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../../../bin REQUIRED)
    set(program ${QUERN_PROGRAM})
  endif()
  set(settings)
  foreach(setting ${arg_SET})
    list(APPEND settings --set ${setting})
  endforeach()
  add_test(NAME conformance.${target} COMMAND ${program} plugins check $<TARGET_FILE:${target}> ${settings})
  set_tests_properties(conformance.${target} PROPERTIES SKIP_RETURN_CODE 4 TIMEOUT 600 LABELS conformance)
endfunction()
