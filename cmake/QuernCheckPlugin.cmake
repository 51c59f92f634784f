# quern_check_plugin(<id> KIND <kind> [SET key=value...] [DEVICE <id>] [EXPECT file]): a ctest test that runs the conformance kit on a plugin's
# library (docs/conformance.md), after add_quern_plugin and named as there; quern_check_plugin(<target> ...) takes
# any library. SET gives options of the plugin, for those that the kit has no value for, and DEVICE what communicators
# and stores work with, cpu if not given. EXPECT is a file of the plugin's expected values, which
# `quern plugins check --expect file --write` writes. A plugin whose hardware is not
# here is reported as skipped, after the contracts that need none.
function(quern_check_plugin name)
  cmake_parse_arguments(arg "" "KIND;DEVICE;EXPECT" "SET" ${ARGN})
  set(target ${name})
  if(arg_KIND)
    set(target quern_${arg_KIND}_${name})
  endif()
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "quern_check_plugin(${name}): found ${arg_UNPARSED_ARGUMENTS}, expected KIND, SET, DEVICE, EXPECT")
  elseif(NOT TARGET ${target})
    get_property(plugins GLOBAL PROPERTY QUERN_PLUGINS)
    list(JOIN plugins ", " plugins)
    message(FATAL_ERROR "quern_check_plugin(${name}): found no target ${target}, expected the id and KIND of an "
      "add_quern_plugin above, or the target of a library; plugins so far: ${plugins}")
  endif()
  set(settings)
  foreach(setting ${arg_SET})
    list(APPEND settings --set ${setting})
  endforeach()
  if(arg_DEVICE)
    list(APPEND settings --device ${arg_DEVICE})
  endif()
  if(arg_EXPECT)
    cmake_path(ABSOLUTE_PATH arg_EXPECT BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    list(APPEND settings --expect ${arg_EXPECT})
  endif()
  add_test(NAME conformance.${target} COMMAND quern::cli plugins check $<TARGET_FILE:${target}> ${settings})
  set_tests_properties(conformance.${target} PROPERTIES SKIP_RETURN_CODE 4 TIMEOUT 600)
  quern_label_tests(conformance conformance.${target})
endfunction()
