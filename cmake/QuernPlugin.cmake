# add_quern_plugin(<id> KIND <kind> [SOURCES ...] [LINK ...] [TEST_LINK ...] [LABELS ...])
#
# A plugin as quern loads it, in its own tree and in anybody's: the module quern_<kind>_<id>, whose file is
# plugins/<kind>/libquern_<id>.so in the build folder (so that QUERN_PLUGIN_PATH=<build>/plugins finds it) and
# lib/quern/plugins/<kind>/ below the install prefix (where a quern of the same prefix finds it). Of its symbols only
# quern_plugin_manifest can be seen from outside.
#
# SOURCES: all of the folder's .cpp and .cu files when not given, build folders inside it left out. Those that end in _test.cpp become the doctest program
# <kind>_<id>_test, compiled together with the others, so that tests see what the library hides; TEST_LINK is for them.
# ctest also asks quern to load the plugin.
#
# The sources are the object library quern_<kind>_<id>_objects: target_compile_options and the like are for that one.

include(${CMAKE_CURRENT_LIST_DIR}/QuernTestLabels.cmake)

# quern_sources(<variable>): the folder's sources without tests and benchmarks, recursively; <variable>_TESTS: its tests.
macro(quern_sources variable)
  file(GLOB_RECURSE ${variable} CONFIGURE_DEPENDS *.cpp *.cu)
  quern_drop_built(${variable})
  quern_split_tests(${variable})
endmacro()

# quern_drop_built(<variable>): leaves out files in build folders below the source folder (`cmake -B build`), where
# CMake keeps programs of its own. The source folder itself may be the build folder.
function(quern_drop_built variable)
  set(kept)
  foreach(file IN LISTS ${variable})
    file(RELATIVE_PATH folder ${CMAKE_CURRENT_SOURCE_DIR} ${file})
    cmake_path(GET folder PARENT_PATH folder)
    set(built OFF)
    while(NOT folder STREQUAL "")
      set(path ${CMAKE_CURRENT_SOURCE_DIR}/${folder})
      if(folder MATCHES "(^|/)CMakeFiles$" OR path STREQUAL CMAKE_BINARY_DIR OR EXISTS ${path}/CMakeCache.txt)
        set(built ON)
      endif()
      cmake_path(GET folder PARENT_PATH folder)
    endwhile()
    if(NOT built)
      list(APPEND kept ${file})
    endif()
  endforeach()
  set(${variable} ${kept} PARENT_SCOPE)
endfunction()

# quern_split_tests(<variable>): moves the tests of a list to <variable>_TESTS, and leaves out benchmarks.
macro(quern_split_tests variable)
  set(${variable}_TESTS ${${variable}})
  list(FILTER ${variable} EXCLUDE REGEX "_(test|bench)\\.cpp$")
  list(FILTER ${variable}_TESTS INCLUDE REGEX "_test\\.cpp$")
endmacro()

# quern_add_test(<name> SOURCES ... LINK ... [LABELS ...]): a doctest program, each case a ctest test.
function(quern_add_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK;LABELS" ${ARGN})
  if(NOT QUERN_TESTS OR NOT arg_SOURCES)
    return()
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE quern_test_main ${arg_LINK})
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)  # a test runs once
  # A header instead of definitions, so that a compiler cache serves other folders in all but the files that include it.
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/test_paths/test_paths.h CONTENT
    "#pragma once\n#define QUERN_SOURCE_DIR \"@PROJECT_SOURCE_DIR@\"\n#define QUERN_BUILD_DIR \"@CMAKE_BINARY_DIR@\"\n" @ONLY)
  target_include_directories(${name} PRIVATE ${CMAKE_BINARY_DIR}/test_paths)
  if("untrusted" IN_LIST arg_LABELS)
    if(NOT TARGET untrusted_tests)
      add_custom_target(untrusted_tests)  # what the sanitized build is for
    endif()
    add_dependencies(untrusted_tests ${name})
  endif()
  doctest_discover_tests(${name} TEST_PREFIX "${name}: " PROPERTIES SKIP_REGULAR_EXPRESSION "skipped:" TIMEOUT 300
    FAIL_REGULAR_EXPRESSION "cases:[^0-9]+0[^0-9]"  # a name that selects nothing: it may have no semicolon
    ENVIRONMENT "QUERN_VERIFY_PLANS=1")
  # Read by ctest after doctest's own file, which says what cases there are.
  set(label unit)
  if(arg_LABELS)
    set(label ${arg_LABELS})
  endif()
  set(labels ${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake)
  set(function ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/QuernTestLabels.cmake)
  file(CONFIGURE OUTPUT ${labels} @ONLY CONTENT
    "include(\"@function@\")\nset(QUERN_SLOW_TESTS [==[@QUERN_SLOW_TESTS@]==])\nquern_label_tests(@label@ \${@name@_TESTS})\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${labels})
endfunction()

function(add_quern_plugin id)
  cmake_parse_arguments(arg "" "KIND" "SOURCES;LINK;TEST_LINK;LABELS" ${ARGN})
  set(kinds device model precision communicator offload optimizer schedule data log)
  list(JOIN kinds ", " known)
  if(NOT arg_KIND IN_LIST kinds)
    message(FATAL_ERROR "add_quern_plugin(${id}): KIND: found \"${arg_KIND}\", expected one of ${known}")
  elseif(NOT id MATCHES "^[A-Za-z0-9_-]+$")
    message(FATAL_ERROR "add_quern_plugin: found the id \"${id}\", expected letters, digits, _ and -")
  elseif(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "add_quern_plugin(${id}): found ${arg_UNPARSED_ARGUMENTS}, expected KIND, SOURCES, LINK, TEST_LINK, LABELS")
  endif()
  if(arg_SOURCES)
    set(sources ${arg_SOURCES})
    quern_split_tests(sources)
  else()
    quern_sources(sources)
  endif()

  set(target quern_${arg_KIND}_${id})
  add_library(${target}_objects OBJECT ${sources})
  set_target_properties(${target}_objects PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON)
  target_include_directories(${target}_objects PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(${target}_objects PUBLIC quern::headers ${arg_LINK})
  # As quern itself: equal source gives equal bits in every translation unit.
  target_compile_options(${target}_objects PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)

  add_library(${target} MODULE)
  target_link_libraries(${target} PRIVATE ${target}_objects quern::quern ${arg_LINK})
  # Templates of the standard library, and clones of a function, would be seen in spite of hidden visibility.
  set(symbols ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/plugin_symbols.map)
  target_link_options(${target} PRIVATE -Wl,--version-script=${symbols})
  if(NOT QUERN_SANITIZE)
    target_link_options(${target} PRIVATE -Wl,--no-undefined)  # a missing library shows here, not when users load it
  endif()
  # Libraries of LINK outside the system's folders (CUDA's) are found after installation too.
  set_target_properties(${target} PROPERTIES OUTPUT_NAME quern_${id} PREFIX "lib" LINK_DEPENDS ${symbols}
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/plugins/${arg_KIND} INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS ${target} LIBRARY DESTINATION lib/quern/plugins/${arg_KIND})
  set_property(GLOBAL APPEND PROPERTY QUERN_PLUGINS ${target})

  quern_add_test(${arg_KIND}_${id}_test SOURCES ${sources_TESTS}
    LINK ${target}_objects quern::quern quern::testkit ${arg_LINK} ${arg_TEST_LINK} LABELS ${arg_LABELS})
  add_test(NAME plugin.${arg_KIND}.${id} COMMAND quern::cli plugins info ${arg_KIND} ${id} --path $<TARGET_FILE:${target}>)
  quern_label_tests(plugin plugin.${arg_KIND}.${id})
endfunction()
