# How targets of this tree are made: warnings, where results go, modules of the core. Plugins and tests are made as
# anybody's are, by cmake/QuernPlugin.cmake. A source folder is one target; its *_test.cpp files are that target's test
# program.

include(${PROJECT_SOURCE_DIR}/cmake/QuernPlugin.cmake)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_program(CCACHE ccache)
if(CCACHE)
  # Paths below the source folder are hashed relative to it, so that clones in other folders share the cache.
  # `cmake -E env` takes longer to start than ccache to answer.
  set(CMAKE_CXX_COMPILER_LAUNCHER env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${CCACHE})
endif()

add_compile_definitions(QUERN_VERSION="${PROJECT_VERSION}")
# Floats are not contracted: equal source gives equal bits in every translation unit. Kernels may choose otherwise.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off> $<$<COMPILE_LANGUAGE:CXX>:-Wall> $<$<COMPILE_LANGUAGE:CXX>:-Wextra>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 warns of faults inside std::variant, std::map and std::string where there are none.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized> $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(QUERN_SANITIZE)
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()

# quern_add_module(<name> [DEPENDS modules...] [LINK libraries...] [LABELS ...]): a part of the core, as objects.
function(quern_add_module name)
  cmake_parse_arguments(arg "" "" "DEPENDS;LINK;LABELS" ${ARGN})
  quern_sources(sources)
  if(NOT sources)
    return()
  endif()
  add_library(quern_${name} OBJECT ${sources})
  target_include_directories(quern_${name} PUBLIC ${PROJECT_SOURCE_DIR}/core/include ${PROJECT_SOURCE_DIR}/core/src)
  target_link_libraries(quern_${name} PUBLIC fmt::fmt-header-only ${arg_LINK})
  set_property(GLOBAL APPEND PROPERTY QUERN_MODULES quern_${name})
  quern_add_test(${name}_test SOURCES ${sources_TESTS} LINK quern quern_testkit ${arg_LINK} LABELS ${arg_LABELS})
endfunction()
