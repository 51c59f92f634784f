# quern_label_tests(<labels> <test>...): gives tests their labels, and `fast` to those that need no GPU and that
# QUERN_SLOW_TESTS does not name by the beginning of their names: what one runs after each edit. Slow ones begin first, so
# that none is left running alone. OpenMP's threads sleep while they wait: the cores are for other tests. Included by
# CMake and by ctest.
function(quern_label_tests labels)
  foreach(test IN LISTS ARGN)
    set(speed fast)
    foreach(slow IN LISTS QUERN_SLOW_TESTS)
      string(FIND "${test}" "${slow}" place)
      if(place EQUAL 0)
        set(speed)
        set_tests_properties("${test}" PROPERTIES COST 10)
      endif()
    endforeach()
    if(";${labels};" MATCHES ";gpu;")
      set(speed)
    endif()
    set_tests_properties("${test}" PROPERTIES LABELS "${labels};${speed}" ENVIRONMENT_MODIFICATION OMP_WAIT_POLICY=set:passive)
  endforeach()
endfunction()
